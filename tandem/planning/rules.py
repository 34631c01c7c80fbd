"""Rules that clusters scale by, as they are published; here to be compared with. Simplifications are named at each.

All are told the same as our planner, and none is given less than its source has.
"""

import math
from collections import deque
from dataclasses import dataclass

from tandem.planning.observation import Observation, Plan, PoolState
from tandem.planning.planner_settings import PlannerConfig
from tandem.routing.speed import PrefillWork


@dataclass(frozen=True, slots=True)
class FixedPools:
    """Never anything else."""

    num_prefill: int
    num_decode: int

    def plan(self, observation: Observation) -> Plan:
        return Plan(num_prefill=self.num_prefill, num_decode=self.num_decode, reason="fixed")


class UtilisationRule:
    """Kubernetes HPA v2 on utilisation: `ceil(replicas x use / target)` within 10 % tolerance, down after 300 s.

    Prefill's use is the share of time it computes, decode's its KV: what a cluster would export for it. Replicas that
    start count as unused when it grows, as the HPA counts pods that are not ready.
    """

    def __init__(
        self, settings: PlannerConfig, target: float = 0.7, stabilisation_s: float = 300.0, tolerance: float = 0.1
    ) -> None:
        self._settings = settings
        self._target = target
        self._tolerance = tolerance
        self._prefill = _Stabilised(stabilisation_s)
        self._decode = _Stabilised(stabilisation_s)

    def plan(self, observation: Observation) -> Plan:
        settings, now_s = self._settings, observation.now_s
        prefill = self._wanted(observation.prefill, _busy(observation))
        decode = self._wanted(observation.decode, _kv_used(observation.decode))
        return Plan(
            num_prefill=self._prefill.at(
                now_s, _bounded(prefill, settings.min_prefill, settings.max_prefill), observation.prefill.num_wanted
            ),
            num_decode=self._decode.at(
                now_s, _bounded(decode, settings.min_decode, settings.max_decode), observation.decode.num_wanted
            ),
            reason=f"use against {self._target:.0%}",
        )

    def _wanted(self, pool: PoolState, used: float) -> int:
        """`used`: replicas' worth of use among the ready ones."""
        if pool.num_ready == 0 or abs(used / pool.num_ready / self._target - 1) <= self._tolerance:
            return pool.num_wanted
        return math.ceil(used / self._target - 1e-9)


class QueueRule:
    """KEDA on waiting requests, as production-stack ships it: one replica for every 5 that wait; decode by KV at 80 %.

    With nothing waiting it wants the minimum, 300 s later.
    """

    def __init__(self, settings: PlannerConfig, target: float = 5.0, stabilisation_s: float = 300.0) -> None:
        self._settings = settings
        self._target = target
        self._prefill = _Stabilised(stabilisation_s)
        self._decode = _Stabilised(stabilisation_s)

    def plan(self, observation: Observation) -> Plan:
        settings, now_s = self._settings, observation.now_s
        prefill = math.ceil(observation.prefill.num_waiting / self._target)
        decode = math.ceil(_kv_used(observation.decode) / 0.8)
        return Plan(
            num_prefill=self._prefill.at(
                now_s, _bounded(prefill, settings.min_prefill, settings.max_prefill), observation.prefill.num_wanted
            ),
            num_decode=self._decode.at(
                now_s, _bounded(decode, settings.min_decode, settings.max_decode), observation.decode.num_wanted
            ),
            reason=f"waiting requests against {self._target:.0f} a replica",
        )


class _Stabilised:
    """The highest recommendation of the last while: the HPA's window for scaling down. It begins with what it found."""

    def __init__(self, span_s: float) -> None:
        self._span_s = span_s
        self._past: deque[tuple[float, int]] = deque()

    def at(self, now_s: float, wanted: int, found: int) -> int:
        if not self._past:
            self._past.append((now_s, found))
        self._past.append((now_s, wanted))
        while self._past[0][0] < now_s - self._span_s:
            self._past.popleft()
        return max(num for _, num in self._past)


def _busy(observation: Observation) -> float:
    """Prefill workers that computed: what arrived or waited, at most all of them."""
    traffic, pool = observation.traffic, observation.prefill
    if pool.speed is None or traffic.num_requests == 0 or traffic.duration_s <= 0:
        return 0.0
    mean = PrefillWork.of(
        round(traffic.num_prompt_tokens / traffic.num_requests), round(traffic.num_cached_tokens / traffic.num_requests)
    )
    work_ms = traffic.num_requests * pool.speed.prefill.ms(mean) + pool.queued_ms
    return min(float(pool.num_ready), work_ms / 1000 / traffic.duration_s)


def _kv_used(pool: PoolState) -> float:
    """Workers' worth of KV that is taken."""
    return pool.num_context_tokens / pool.kv_tokens if pool.kv_tokens else 0.0


def _bounded(num_replicas: int, least: int, most: int) -> int:
    return max(least, min(most, num_replicas))
