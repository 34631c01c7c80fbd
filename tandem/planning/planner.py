"""Scaling policy by objectives: the replicas needed at the demand to come, with an explanation.

Pools grow at once, for the demand that may come while a replica starts. They shrink only when the remaining replicas
would have sustained the whole recent past with a margin ("comfort"). Between the two thresholds nothing changes, so a
steady load leads to a steady size. Deterministic: reads no clock, and its state depends on observations only.
"""

from collections import deque
from dataclasses import dataclass, replace

from tandem.planning.capacity import DecodeCapacity, OfferedLoad, PrefillCapacity
from tandem.planning.demand import Demand
from tandem.planning.observation import Observation, Plan, PoolState
from tandem.planning.pace import SpeedCorrection
from tandem.planning.planner_settings import PlannerConfig
from tandem.planning.pools import Prospect
from tandem.planning.reasons import Change, explain, warn
from tandem.routing.speed import DecodeSpeed, PrefillSpeed, Speed

_MOST_PATIENCE = 4.0  # factor of the hold time after repeated mistakes
_MUCH_LESS = 2 / 3  # of the strain, for which accelerators move between the pools at once

Sizes = tuple[int, int]


@dataclass(frozen=True, slots=True)
class ReplicaNeed:
    """Replicas needed at one moment: the fewest that suffice, and the fewest that suffice with a margin."""

    at_s: float
    least: int
    comfortable: int


class Holding:
    """Hysteresis of one pool. After shrinking that had to be undone soon, it waits longer before shrinking again."""

    def __init__(self, hold_s: float) -> None:
        self._hold_s = hold_s
        self._needs: deque[ReplicaNeed] = deque()
        self._shrunk_at_s: float | None = None
        self._started_at_s: float | None = None
        self._patience = 1.0

    def decide(self, need: ReplicaNeed, num_wanted: int, startup_s: float) -> int:
        """Replicas wanted from now on."""
        hold_s = max(self._hold_s, 1.5 * startup_s) * self._patience
        self._started_at_s = need.at_s if self._started_at_s is None else self._started_at_s
        self._needs.append(need)
        while self._needs[0].at_s < need.at_s - hold_s:
            self._needs.popleft()
        if need.least > num_wanted:
            self._regret(need.at_s, max(self._hold_s, 1.5 * startup_s))
            return need.least
        if need.at_s - self._started_at_s < hold_s:
            return num_wanted
        enough = max(past.comfortable for past in self._needs)
        if enough < num_wanted:
            if self._shrunk_at_s is not None and need.at_s - self._shrunk_at_s >= hold_s:
                self._patience = max(1.0, self._patience / 2)
            self._shrunk_at_s = need.at_s
        return min(num_wanted, enough)

    def _regret(self, at_s: float, soon_s: float) -> None:
        """Record growth; if it follows shrinking within `soon_s`, the shrinking was a mistake."""
        if self._shrunk_at_s is not None and at_s - self._shrunk_at_s < soon_s:
            self._patience = min(_MOST_PATIENCE, 2 * self._patience)
        self._shrunk_at_s = None


class BudgetDivision:
    """Division of a budget that is too small, with hysteresis: each move costs a pool a replica and a start-up."""

    def __init__(self, settings: PlannerConfig) -> None:
        self._settings = settings
        self._holdings = (Holding(settings.hold_s), Holding(settings.hold_s))
        self._moved_at_s: float | None = None
        self._was_to_prefill = False

    def decide(
        self, prospect: Prospect, at_s: float, had: Sizes, wanted: Sizes, startup_s: tuple[float, float]
    ) -> Sizes:
        """(Prefill, decode) sizes within the budget; call it for every observation.

        Args:
            had: sizes wanted before.
            wanted: sizes that the objectives need.
            startup_s: start-up times of both pools' replicas.
        """
        settings, most = self._settings, self._settings.max_accelerators
        is_short = most is not None and settings.accelerators(*wanted) > most
        best = prospect.best_within(most) if most is not None and is_short else wanted
        num_prefill, num_decode = (
            holding.decide(ReplicaNeed(at_s, num, num), before, start_s)
            for holding, num, before, start_s in zip(self._holdings, best, had, startup_s, strict=True)
        )
        if most is None or not is_short or settings.accelerators(*had) > most:
            return best
        if self._is_urgent(prospect, at_s, had, best, max(startup_s)):
            self._moved_at_s, self._was_to_prefill = at_s, best[0] > had[0]
            return best
        if num_prefill > had[0]:
            left = most - num_decode * settings.decode_accelerators
            return min(num_prefill, left // settings.prefill_accelerators), num_decode
        left = most - num_prefill * settings.prefill_accelerators
        return num_prefill, min(num_decode, left // settings.decode_accelerators)

    def _is_urgent(self, prospect: Prospect, at_s: float, had: Sizes, best: Sizes, startup_s: float) -> bool:
        """Whether `best` is so much better that it is not waited for, and takes no such move back before it has had
        its effect. NOTE: a large move is applied in steps, so it may go on.
        """
        is_taken_back = (best[0] > had[0]) is not self._was_to_prefill
        if self._moved_at_s is not None and is_taken_back and at_s - self._moved_at_s <= startup_s:
            return False
        return prospect.strain(*best)[0] <= _MUCH_LESS * prospect.strain(*had)[0]


class SloPlanner:
    """Scaling policy by latency objectives. `prior_*`: speed of a pool's workers until it has been measured."""

    def __init__(
        self, settings: PlannerConfig, prior_prefill: Speed | None = None, prior_decode: Speed | None = None
    ) -> None:
        self._settings = settings
        self._prior_prefill = prior_prefill
        self._prior_decode = prior_decode or prior_prefill
        self._demand = Demand(settings.forecast)
        self._pace = SpeedCorrection(settings.warmup_s)
        self._prefill = Holding(settings.hold_s)
        self._decode = Holding(settings.hold_s)
        self._division = BudgetDivision(settings)

    def plan(self, observation: Observation) -> Plan:
        """Plan for one observation; call it once per window, in order."""
        self._demand.observe(observation.traffic, observation.now_s)
        prefill_speed = observation.prefill.speed or self._prior_prefill
        decode_speed = observation.decode.speed or self._prior_decode
        if prefill_speed is None or decode_speed is None:
            return self._unknown(observation)
        self._pace.observe(observation, prefill_speed.prefill, decode_speed.decode)
        prefill = self._prospect(observation, prefill_speed.prefill, decode_speed.decode, observation.prefill)
        decode = self._prospect(observation, prefill_speed.prefill, decode_speed.decode, observation.decode)
        return self._decide(observation, prefill, decode)

    def _decide(self, observation: Observation, prefill: Prospect, decode: Prospect) -> Plan:
        settings = self._settings
        now_s, had = observation.now_s, (observation.prefill.num_wanted, observation.decode.num_wanted)
        bounded = (
            _bounded(had[0], settings.min_prefill, settings.max_prefill),
            _bounded(had[1], settings.min_decode, settings.max_decode),
        )
        startup_s = self._startup_s(observation.prefill), self._startup_s(observation.decode)
        num_prefill = self._prefill.decide(
            ReplicaNeed(now_s, prefill.prefill_need(), prefill.prefill_need(settings.comfort)),
            bounded[0],
            startup_s[0],
        )
        num_decode = self._decode.decide(
            ReplicaNeed(now_s, decode.decode_need(), decode.decode_need(settings.comfort)),
            bounded[1],
            startup_s[1],
        )
        both = replace(prefill, load=_heavier(prefill, decode))
        wanted = (num_prefill, num_decode)
        num_prefill, num_decode = self._division.decide(both, now_s, bounded, wanted, startup_s)
        change = Change(
            had=had,
            wanted=wanted,
            given=(num_prefill, num_decode),
            load=self._demand.now(),
            prospect=both,
            horizon_s=self._horizon_s(observation.prefill),
            before=both.outlook(max(1, had[0]), max(1, had[1])),
            after=both.outlook(num_prefill, num_decode),
        )
        return Plan(
            num_prefill=num_prefill,
            num_decode=num_decode,
            reason=explain(change),
            now=change.before,
            then=change.after,
            warnings=warn(change),
        )

    def _prospect(
        self, observation: Observation, prefill: PrefillSpeed, decode: DecodeSpeed, pool: PoolState
    ) -> Prospect:
        """Demand and capacity at the time when a replica of `pool` requested now would be ready."""
        settings = self._settings
        horizon_s = self._horizon_s(pool)
        decoding, variation = observation.decode, self._demand.variation(settings.variation)
        prospect = Prospect(
            settings=settings,
            load=self._demand.at_most(horizon_s),
            prefill=PrefillCapacity(prefill, variation, settings.share),
            decode=DecodeCapacity(
                self._pace.corrected(decode), decoding.kv_tokens, decoding.max_running, variation, settings.share
            ),
            pace=self._pace.prefill,
        )
        offered = prospect.at(self._demand.arriving(horizon_s)).offered
        return replace(prospect, backlog_ms=self._backlog_ms(observation.prefill, offered, horizon_s))

    def _backlog_ms(self, pool: PoolState, offered: float, horizon_s: float) -> float:
        """Backlog at the horizon: waiting and arriving work minus the work of ready and starting replicas."""
        startup_s = self._startup_s(pool)
        coming = sorted(max(0.0, min(horizon_s, startup_s - so_far_s)) for so_far_s in pool.starting_s)
        backlog_ms, at_s, num_ready = pool.queued_ms / self._pace.prefill, 0.0, pool.num_ready
        for until_s in (*coming, horizon_s):
            backlog_ms = max(0.0, backlog_ms + 1000 * (until_s - at_s) * (offered - num_ready))
            at_s, num_ready = until_s, num_ready + 1
        return backlog_ms

    def _horizon_s(self, pool: PoolState) -> float:
        return self._startup_s(pool) + self._settings.interval_s

    def _startup_s(self, pool: PoolState) -> float:
        return self._settings.startup_s if pool.startup_s is None else pool.startup_s

    def _unknown(self, observation: Observation) -> Plan:
        settings = self._settings
        reason = "nothing is known of the workers' speed yet; the pools stay as they are"
        return Plan(
            num_prefill=_bounded(observation.prefill.num_wanted, settings.min_prefill, settings.max_prefill),
            num_decode=_bounded(observation.decode.num_wanted, settings.min_decode, settings.max_decode),
            reason=reason,
            warnings=(reason,),
        )


def _heavier(prefill: Prospect, decode: Prospect) -> OfferedLoad:
    """Returns the load with the higher request rate of the two horizons."""
    return prefill.load if prefill.load.requests_per_s >= decode.load.requests_per_s else decode.load


def _bounded(num_replicas: int, least: int, most: int) -> int:
    return max(least, min(most, num_replicas))
