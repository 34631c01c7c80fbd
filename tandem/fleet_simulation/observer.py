"""Observes the simulated fleet for a planner: traffic in one window after another, and the state of the pools.

Observations contain nothing that the running system could not know.
"""

import math
from dataclasses import dataclass, field

from tandem.fleet_simulation.decode_worker import DecodeWorker
from tandem.fleet_simulation.prefill_worker import PrefillWorker
from tandem.fleet_simulation.replicas import ReplicaPool
from tandem.fleet_simulation.request import SimulatedRequest
from tandem.fleet_simulation.setting import SimulationSetting
from tandem.planning.observation import Observation, PoolState, Traffic


@dataclass(slots=True)
class _Window:
    """Sums since the last observation."""

    num_requests: int = 0
    num_rejected: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_finished: int = 0
    num_output_tokens: int = 0
    missing_tokens: list[int] = field(default_factory=list)
    ttfts_s: list[float] = field(default_factory=list)
    tpots_s: list[float] = field(default_factory=list)


class SimulatedObserver:
    """Counts traffic; `observe` returns the observation and starts the next window."""

    def __init__(
        self, setting: SimulationSetting, prefill: ReplicaPool[PrefillWorker], decode: ReplicaPool[DecodeWorker]
    ) -> None:
        self._setting = setting
        self._prefill = prefill
        self._decode = decode
        self._window = _Window()
        self._since_s = 0.0

    def arrived(self, request: SimulatedRequest, num_cached_tokens: int) -> None:
        """Record an arrival."""
        self._window.num_requests += 1
        self._window.num_rejected += request.rejected
        self._window.num_prompt_tokens += request.recorded.num_prompt_tokens
        self._window.num_cached_tokens += num_cached_tokens
        self._window.missing_tokens.append(request.recorded.num_prompt_tokens - num_cached_tokens)

    def began(self, request: SimulatedRequest) -> None:
        """Record a request's first token."""
        assert request.first_token_s is not None
        self._window.ttfts_s.append(request.first_token_s - request.recorded.arrival_s)

    def ended(self, request: SimulatedRequest) -> None:
        """Record a request's end."""
        tpot_s = request.served().tpot_s
        self._window.num_finished += 1
        self._window.num_output_tokens += request.recorded.num_output_tokens
        if tpot_s is not None:
            self._window.tpots_s.append(tpot_s)

    def observe(self, now_s: float, wanted: tuple[int, int]) -> Observation:
        """The traffic since the last call and the pools now. `wanted`: replicas of (prefill, decode) wanted."""
        window, self._window = self._window, _Window()
        since_s, self._since_s = self._since_s, now_s
        return Observation(
            now_s=now_s,
            traffic=Traffic(
                duration_s=now_s - since_s,
                num_requests=window.num_requests,
                num_rejected=window.num_rejected,
                num_prompt_tokens=window.num_prompt_tokens,
                num_cached_tokens=window.num_cached_tokens,
                num_finished=window.num_finished,
                num_output_tokens=window.num_output_tokens,
                variation=_variation(window.missing_tokens),
            ),
            prefill=self._prefill_state(wanted[0]),
            decode=self._decode_state(wanted[1]),
            ttft_ms=_mean_ms(window.ttfts_s),
            tpot_ms=_mean_ms(window.tpots_s),
        )

    def _prefill_state(self, num_wanted: int) -> PoolState:
        workers = [replica.worker for replica in self._prefill.ready()]
        speed = self._setting.prefill
        return PoolState(
            num_wanted=num_wanted,
            num_ready=len(workers),
            starting_s=self._prefill.starting_s(),
            speed=speed,
            kv_tokens=self._setting.prefill_kv_tokens,
            num_waiting=sum(worker.num_waiting for worker in workers),
            num_running=sum(worker.num_running for worker in workers),
            num_context_tokens=sum(worker.num_context_tokens for worker in workers),
            queued_ms=sum(speed.prefill.ms(worker.queued()) for worker in workers),
            startup_s=self._setting.startup_s,
        )

    def _decode_state(self, num_wanted: int) -> PoolState:
        workers = [replica.worker for replica in self._decode.ready()]
        return PoolState(
            num_wanted=num_wanted,
            num_ready=len(workers),
            starting_s=self._decode.starting_s(),
            speed=self._setting.decode,
            kv_tokens=self._setting.decode_kv_tokens,
            max_running=self._setting.max_running,
            num_waiting=sum(worker.num_waiting for worker in workers),
            num_running=sum(worker.num_decoding for worker in workers),
            num_context_tokens=round(sum(worker.num_context_tokens() for worker in workers)),
            startup_s=self._setting.startup_s,
        )


def _mean_ms(samples_s: list[float]) -> float | None:
    return 1000 * sum(samples_s) / len(samples_s) if samples_s else None


def _variation(samples: list[int]) -> float | None:
    if not samples:
        return None
    mean = sum(samples) / len(samples)
    return math.sqrt(sum((sample - mean) ** 2 for sample in samples) / len(samples)) / mean
