"""Searches the best sizes of the pools and rates pools of given sizes. Pure.

`Prospect` predicts the latencies of any pair of sizes at one demand. The best sizes are the fewest that meet both
objectives, or, if the budget is too small, those that minimise the larger of the two ratios of latency to objective.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from tandem.planning.capacity import Batch, DecodeCapacity, OfferedLoad, PrefillCapacity
from tandem.planning.observation import Outlook
from tandem.planning.planner_settings import PlannerConfig

_LEAST_WAIT_SHARE = 0.25  # NOTE: waits are kept short even if a long prompt alone takes the whole objective


@dataclass(frozen=True, slots=True)
class Prospect:
    """Demand at one time in the future, and the capacity of workers; predicts latencies for any sizes of the pools.

    Args:
        load: expected demand.
        prefill, decode: capacity of the workers of each pool.
        pace: measured over predicted speed of prefill workers.
        backlog_ms: prompt work that will already wait when a change takes effect, total of the pool.
    """

    settings: PlannerConfig
    load: OfferedLoad
    prefill: PrefillCapacity
    decode: DecodeCapacity
    pace: float = 1.0
    backlog_ms: float = 0.0

    @property
    def service_ms(self) -> float:
        """Mean prefill time of a prompt."""
        return self.prefill.service_ms(self.load) / self.pace

    @property
    def offered(self) -> float:
        """Offered load: mean number of prefill workers kept busy by arrivals."""
        return self.load.requests_per_s * self.service_ms / 1000

    @property
    def own_ms(self) -> float:
        """Prefill time of a prompt itself at the objective's percentile, without waiting."""
        return self.prefill.own_ms(self.service_ms)

    @property
    def alone_ms(self) -> float:
        """Time of a decode step with one request; more workers do not shorten it."""
        return self.decode.speed.step_ms(1, self.load.num_context_tokens)

    def ttft_ms(self, num_prefill: int) -> float:
        """Predicted TTFT at the objective's percentile."""
        return self.prefill.ttft_ms(num_prefill, self.offered, self.service_ms, self._late_ms(num_prefill))

    def batch(self, num_decode: int) -> Batch:
        """Predicted state of the decode workers."""
        return self.decode.batch(num_decode, self.load, min(self.settings.ttft_ms, self.own_ms) / 1000)

    def outlook(self, num_prefill: int, num_decode: int) -> Outlook:
        """Predicted latencies with pools of these sizes."""
        batch = self.batch(num_decode)
        ttft_ms = self.ttft_ms(num_prefill)
        tpot_ms = math.inf if batch.use > 1 else batch.tpot_ms
        return Outlook(
            ttft_ms=ttft_ms,
            tpot_ms=tpot_ms,
            prefill_use=self.offered / num_prefill,
            decode_use=batch.use,
            meets_slo=ttft_ms <= self.settings.ttft_ms and tpot_ms <= self.settings.tpot_ms,
        )

    def prefill_need(self, comfort: float = 1.0) -> int:
        """Fewest prefill workers within the bounds that stay below the share `comfort` of every limit."""
        settings = self.settings
        budget_ms = comfort * max(settings.ttft_ms - self.own_ms, _LEAST_WAIT_SHARE * settings.ttft_ms)
        drained = self.offered + self.backlog_ms / 1000 / settings.drain_s

        def suffices(num: int) -> bool:
            if max(self.offered / settings.max_use / comfort, drained) > num:
                return False
            return self.prefill.wait_ms(num, self.offered, self.service_ms) <= budget_ms

        return _fewest(suffices, settings.min_prefill, settings.max_prefill)

    def decode_need(self, comfort: float = 1.0) -> int:
        """Fewest decode workers within the bounds that stay below the share `comfort` of every limit.

        If a step of one request already exceeds the TPOT objective, that limit is ignored.
        """
        settings, limit_ms = self.settings, self._step_limit_ms(comfort)

        def suffices(num: int) -> bool:
            batch = self.batch(num)
            return batch.tpot_ms <= limit_ms and batch.use <= comfort * settings.max_use

        return _fewest(suffices, settings.min_decode, settings.max_decode)

    def strain(self, num_prefill: int, num_decode: int) -> tuple[float, ...]:
        """Both ratios of latency to objective, the larger first; overloaded pools rate worse than any others."""
        prefill = _strain(self.ttft_ms(num_prefill), self.settings.ttft_ms, self.offered / num_prefill)
        batch = self.batch(num_decode)
        tpot_ms = batch.tpot_ms if batch.use <= 1 else math.inf
        decode = _strain(tpot_ms, self.settings.tpot_ms, self._decode_demand(num_decode))
        return max(prefill, decode), min(prefill, decode)

    def best_within(self, max_accelerators: int) -> tuple[int, int]:
        """(Prefill, decode) sizes of least strain within the budget; the smallest of equals."""
        settings = self.settings
        pairs = _pairs(settings, max_accelerators)
        return min(pairs, key=lambda pair: (self.strain(*pair), settings.accelerators(*pair), pair))

    def at(self, load: OfferedLoad, backlog_ms: float | None = None) -> "Prospect":
        """The same capacity with another demand."""
        return replace(self, load=load, backlog_ms=self.backlog_ms if backlog_ms is None else backlog_ms)

    def _step_limit_ms(self, comfort: float) -> float:
        """First limit that a step of one request meets: `comfort` of the TPOT objective, all of it, or none."""
        limits_ms = comfort * self.settings.tpot_ms, self.settings.tpot_ms
        return next((limit_ms for limit_ms in limits_ms if self.alone_ms <= limit_ms), math.inf)

    def _late_ms(self, num_prefill: int) -> float:
        """Backlog that remains after `drain_s`, by when it should have been worked off."""
        spare = max(0.0, num_prefill - self.offered)
        return max(0.0, self.backlog_ms - 1000 * spare * self.settings.drain_s)

    def _decode_demand(self, num_decode: int) -> float:
        """Demanded token throughput over that of as many requests as fit the workers at once."""
        load, running = self.load, self.decode.most_running(self.load)
        step_ms = self.decode.speed.step_ms(running, running * load.num_context_tokens)
        return load.requests_per_s * load.num_output_tokens * step_ms / 1000 / running / num_decode


def _strain(latency_ms: float, objective_ms: float, use: float) -> float:
    return latency_ms / objective_ms if math.isfinite(latency_ms) else 1e6 * max(1.0, use)


def _fewest(suffices: Callable[[int], bool], least: int, most: int) -> int:
    """Smallest count from `least` to `most` that suffices, by bisection; `most` if none does. Must be monotonic."""
    while least < most:
        middle = (least + most) // 2
        least, most = (least, middle) if suffices(middle) else (middle + 1, most)
    return least


def _pairs(settings: PlannerConfig, max_accelerators: int) -> Iterable[tuple[int, int]]:
    """Every prefill size with the largest decode pool the budget leaves; a smaller one never has less strain."""
    for num_prefill in range(settings.min_prefill, settings.max_prefill + 1):
        left = max_accelerators - num_prefill * settings.prefill_accelerators
        num_decode = min(settings.max_decode, left // settings.decode_accelerators)
        if num_decode < settings.min_decode:
            return
        yield num_prefill, num_decode
