"""Computes the traffic between two observations from the counters of all gateways.

Invariant: a gateway counts from its first observation, so a new one is no burst; after a restart all its counts are
used; counts of a gateway that could not be reached for a while are spread over that time. Prefix hits are known when
requests finish; in a window without any, the last known share is used.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tandem.planner_service.distribution import Distribution
from tandem.planner_service.gateway_counts import GatewayCounts
from tandem.planning.observation import Traffic

FORGET_S = 900.0  # without an answer, after which a gateway counts as new
_CLOCK_TOLERANCE_S = 2.0


@dataclass(frozen=True, slots=True)
class TrafficWindow:
    """Counts of all gateways in one window. `ttft`: of requests with their first token in it; `tpot`: that ended."""

    traffic: Traffic
    ttft: Distribution
    tpot: Distribution


@dataclass(frozen=True, slots=True)
class _Seen:
    """The counters of one gateway at its last observation."""

    now_s: float
    wall_s: float
    counts: GatewayCounts


class TrafficMeter:
    """Computes traffic from counters. Call `update` once for every observation of the gateways."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}
        self._last_s: float | None = None
        self._cached_share = 0.0

    def update(self, now_s: float, wall_s: float, counts: Mapping[str, GatewayCounts]) -> TrafficWindow | None:
        """Returns the traffic since the last call.

        Args:
            now_s: time of a monotonic clock.
            wall_s: time of the wall clock, with which gateways date their start.
            counts: counters by address, of the gateways that answered.

        Returns:
            None until some gateway has been observed twice.
        """
        last_s, self._last_s = self._last_s, now_s
        grown = [
            self._growth(self._seen.get(address), found, now_s, now_s if last_s is None else last_s)
            for address, found in counts.items()
        ]
        for address, found in counts.items():
            self._seen[address] = _Seen(now_s, wall_s, found)
        self._seen = {address: seen for address, seen in self._seen.items() if now_s - seen.now_s <= FORGET_S}
        known = [growth for growth in grown if growth is not None]
        if last_s is None or not known or now_s <= last_s:
            return None
        total = sum(known, GatewayCounts())
        if total.num_looked_up_tokens:
            self._cached_share = min(1.0, total.num_cached_tokens / total.num_looked_up_tokens)
        return _window(now_s - last_s, total, self._cached_share)

    def _growth(self, seen: _Seen | None, found: GatewayCounts, now_s: float, last_s: float) -> GatewayCounts | None:
        """Counts that one gateway adds to the window; None at its first observation."""
        if seen is None or now_s <= seen.now_s:
            return None
        if not found.began_anew_after(seen.counts):
            growth = found.since(seen.counts)
        elif found.born_s is None or found.born_s >= seen.wall_s - _CLOCK_TOLERANCE_S:
            growth = found
        else:
            return None  # NOTE: started before our last observation: another gateway answers at the same address
        return growth.scaled(min(1.0, (now_s - last_s) / (now_s - seen.now_s)))


def _window(duration_s: float, counts: GatewayCounts, cached_share: float) -> TrafficWindow:
    num_requests = counts.num_arrivals + counts.num_turned_away
    num_tokens = counts.num_arrived_tokens
    if counts.num_arrivals:
        num_tokens *= num_requests / counts.num_arrivals
    traffic = Traffic(
        duration_s=duration_s,
        num_requests=round(num_requests),
        num_rejected=round(counts.num_refused),
        num_prompt_tokens=round(num_tokens),
        num_cached_tokens=round(num_tokens * cached_share),
        num_finished=round(counts.num_ended),
        num_output_tokens=round(counts.num_output_tokens),
    )
    return TrafficWindow(traffic, counts.ttft, counts.tpot)
