"""Published autoscaling rules, as baselines for comparison. Each class names its simplifications.

All get the same observations as our planner, which contain everything the published rules use.
"""

import math
from collections import deque
from dataclasses import dataclass

from tandem.planning.observation import Observation, Plan, PoolState
from tandem.planning.planner_settings import PlannerConfig
from tandem.routing.speed import PrefillWork


@dataclass(frozen=True, slots=True)
class FixedPools:
    """Keeps the numbers of replicas constant."""

    num_prefill: int
    num_decode: int

    def plan(self, observation: Observation) -> Plan:
        return Plan(num_prefill=self.num_prefill, num_decode=self.num_decode, reason="fixed")


class UtilisationRule:
    """Kubernetes HPA v2 on utilisation: `ceil(replicas x use / target)` outside a 10 % tolerance, down after 300 s.

    The use of prefill is its share of busy time, that of decode its share of KV in use, as a cluster would export them.
    Starting replicas count as unused, as the HPA counts pods that are not ready when it scales up.
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
        """Recommended replicas. `used`: use summed over the ready replicas, in replicas."""
        if pool.num_ready == 0 or abs(used / pool.num_ready / self._target - 1) <= self._tolerance:
            return pool.num_wanted
        return math.ceil(used / self._target - 1e-9)


class QueueRule:
    """KEDA on waiting requests, as production-stack ships it: one replica per 5 waiting; decode by KV at 80 %.

    If nothing waits, it scales down to the minimum after 300 s.
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
    """Highest recommendation of the last `span_s` (the HPA's stabilisation window), starting with the initial size."""

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
    """Mean number of busy prefill workers: the work that arrived or waits, at most all ready ones."""
    traffic, pool = observation.traffic, observation.prefill
    if pool.speed is None or traffic.num_requests == 0 or traffic.duration_s <= 0:
        return 0.0
    mean = PrefillWork.of(
        round(traffic.num_prompt_tokens / traffic.num_requests), round(traffic.num_cached_tokens / traffic.num_requests)
    )
    work_ms = traffic.num_requests * pool.speed.prefill.ms(mean) + pool.queued_ms
    return min(float(pool.num_ready), work_ms / 1000 / traffic.duration_s)


def _kv_used(pool: PoolState) -> float:
    """KV in use, in units of one worker's capacity."""
    return pool.num_context_tokens / pool.kv_tokens if pool.kv_tokens else 0.0


def _bounded(num_replicas: int, least: int, most: int) -> int:
    return max(least, min(most, num_replicas))
