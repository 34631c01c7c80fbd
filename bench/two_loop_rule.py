"""NVIDIA Dynamo's published planner, as documented in 2026, as a baseline for comparison."""

import math

from tandem.planning.capacity import DecodeCapacity
from tandem.planning.demand import Demand
from tandem.planning.forecast import ForecastSettings
from tandem.planning.observation import Observation, Plan, PoolState
from tandem.planning.planner_settings import PlannerConfig
from tandem.routing.speed import PrefillWork, Speed


class TwoLoopRule:
    """NVIDIA Dynamo's published planner: a slow loop sets minimum sizes, a fast one changes them by one replica.

    Slow, every 180 s: demand of the last interval over one worker's throughput. Fast, every 5 s: up if the TTFT (or
    the step time) estimated from queues exceeds the objective, down if the remaining workers would stay below 0.8 of
    it; no change while replicas start. Simplified: queues are balanced, so "every engine" is the pool's mean.
    """

    def __init__(
        self, settings: PlannerConfig, slow_s: float = 180.0, quick_s: float = 5.0, safety: float = 0.8
    ) -> None:
        self._settings = settings
        self._slow_s = slow_s
        self._quick_s = quick_s
        self._safety = safety
        span = ForecastSettings(level_s=slow_s, quick_s=slow_s, trend_s=max(slow_s, 300.0))
        self._demand = Demand(span)
        self._least = (settings.min_prefill, settings.min_decode)
        self._slow_at_s = slow_s
        self._quick_at_s = 0.0

    def plan(self, observation: Observation) -> Plan:
        settings, now_s = self._settings, observation.now_s
        self._demand.observe(observation.traffic, now_s)
        prefill, decode = observation.prefill, observation.decode
        wanted = (prefill.num_wanted, decode.num_wanted)
        if prefill.speed is None or decode.speed is None:
            return Plan(num_prefill=wanted[0], num_decode=wanted[1], reason="nothing measured yet")
        if now_s >= self._slow_at_s:
            self._slow_at_s = now_s + self._slow_s
            self._least = self._throughput(observation, prefill.speed, decode.speed)
        if now_s >= self._quick_at_s:
            self._quick_at_s = now_s + self._quick_s
            wanted = (
                self._moved(prefill, self._ttft_ratio(prefill, prefill.speed)),
                self._moved(decode, self._tpot_ratio(decode, decode.speed)),
            )
        return Plan(
            num_prefill=_bounded(max(wanted[0], self._least[0]), settings.min_prefill, settings.max_prefill),
            num_decode=_bounded(max(wanted[1], self._least[1]), settings.min_decode, settings.max_decode),
            reason=f"at least {self._least[0]} and {self._least[1]} by throughput",
        )

    def _throughput(self, observation: Observation, prefill: Speed, decode: Speed) -> tuple[int, int]:
        """`ceil(demand / capacity)`; decode's capacity is that of the largest batch whose step meets the objective."""
        load, settings = self._demand.now(), self._settings
        mean = PrefillWork.of(round(load.num_prompt_tokens), round(load.num_prompt_tokens - load.num_missing_tokens))
        state = observation.decode
        capacity = DecodeCapacity(decode.decode, state.kv_tokens, state.max_running, 0.0, 0.5)
        batch = _largest_batch(capacity, load.num_context_tokens, settings.tpot_ms)
        step_ms = decode.decode.step_ms(batch, batch * load.num_context_tokens)
        tokens_per_s = load.requests_per_s * load.num_output_tokens
        return (
            math.ceil(load.requests_per_s * prefill.prefill.ms(mean) / 1000),
            math.ceil(tokens_per_s * step_ms / 1000 / batch),
        )

    def _moved(self, pool: PoolState, ratios: tuple[float, float]) -> int:
        """Size after the fast loop. `ratios`: estimated latency over objective with all workers, and with one less."""
        if pool.num_ready != pool.num_wanted:
            return pool.num_wanted
        if ratios[0] > 1:
            return pool.num_wanted + 1
        return pool.num_wanted - 1 if pool.num_wanted > 1 and ratios[1] < self._safety else pool.num_wanted

    def _ttft_ratio(self, pool: PoolState, speed: Speed) -> tuple[float, float]:
        """Ratios for TTFT: time of each worker's queue plus one more prompt, over the objective."""
        load = self._demand.now()
        own_ms = speed.prefill.prompt_ms(
            round(load.num_prompt_tokens), round(load.num_prompt_tokens - load.num_missing_tokens)
        )
        return (
            (pool.queued_ms / max(1, pool.num_ready) + own_ms) / self._settings.ttft_ms,
            (pool.queued_ms / max(1, pool.num_ready - 1) + own_ms) / self._settings.ttft_ms,
        )

    def _tpot_ratio(self, pool: PoolState, speed: Speed) -> tuple[float, float]:
        return _step_ratio(pool, speed, pool.num_ready, self._settings.tpot_ms), _step_ratio(
            pool, speed, pool.num_ready - 1, self._settings.tpot_ms
        )


def _step_ratio(pool: PoolState, speed: Speed, num_workers: int, objective_ms: float) -> float:
    if num_workers < 1:
        return math.inf
    running, context = pool.num_running / num_workers, pool.num_context_tokens / num_workers
    kv_use = context / pool.kv_tokens if pool.kv_tokens else 0.0
    return max(speed.decode.step_ms(running, context) / objective_ms, kv_use)


def _largest_batch(capacity: DecodeCapacity, context: float, tpot_ms: float) -> int:
    most = capacity.max_running
    if capacity.kv_tokens:
        most = min(most, int(capacity.kv_tokens / max(1.0, context)))
    while most > 1 and capacity.speed.step_ms(most, most * context) > tpot_ms:
        most -= 1
    return max(1, most)


def _bounded(num_replicas: int, least: int, most: int) -> int:
    return max(least, min(most, num_replicas))
