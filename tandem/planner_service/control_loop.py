"""Control loop of the planner: observe, plan, act and report, once per interval.

Invariant: failures outside never stop the loop; a bug ends the process, which is then restarted.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from tandem.core.clock import Clock
from tandem.planner_service.actuator import Actuator
from tandem.planner_service.decision import ScalingDecision, as_json, error_ms
from tandem.planner_service.metrics import PlannerMetrics
from tandem.planner_service.observer import ClusterObservation
from tandem.planner_service.targets import Leadership
from tandem.planning.observation import Plan, ScalingPolicy

_LOG = logging.getLogger(__name__)
_MOST_ROUND_S = 60.0


class ClusterObserver(Protocol):
    """Source of observations; `Observer` implements it."""

    async def observe(self) -> ClusterObservation: ...


class ControlLoop:
    """Runs the rounds and owns the last decision. `mode` is only reported."""

    def __init__(
        self,
        observer: ClusterObserver,
        policy: ScalingPolicy,
        actuator: Actuator,
        leadership: Leadership,
        metrics: PlannerMetrics,
        clock: Clock,
        *,
        interval_s: float,
        mode: str,
    ) -> None:
        self._observer = observer
        self._policy = policy
        self._actuator = actuator
        self._leadership = leadership
        self._metrics = metrics
        self._clock = clock
        self._interval_s = interval_s
        self._mode = mode
        self._started_s = clock.now_s()
        self._observed_at_s = self._started_s
        self._said: tuple[object, ...] = ()
        self._problems: frozenset[str] = frozenset()
        self.observed: ClusterObservation | None = None
        self.last: ScalingDecision | None = None

    async def run(self) -> None:
        """Runs rounds until cancelled, each starting one interval after the start of the previous one."""
        while True:
            began_s = self._clock.now_s()
            await self.round()
            await asyncio.sleep(max(0.1 * self._interval_s, self._interval_s - (self._clock.now_s() - began_s)))

    async def round(self) -> ScalingDecision | None:
        """Runs one round; returns None if too little was observed to plan."""
        observed = self.observed = await self._observer.observe()
        self._metrics.record_observation(observed, self._leadership.is_leader)
        self._tell_problems(observed.problems)
        decision = None
        if observed.observation is not None:
            decision = await self._decide(observed, self._policy.plan(observed.observation))
        self._observed_at_s = self._clock.now_s()
        return decision

    def health(self) -> tuple[int, dict[str, object]]:
        """Status and body of /health; status 503 if no round has completed for too long."""
        age_s = self._clock.now_s() - self._observed_at_s
        is_stuck = age_s > 3 * self._interval_s + _MOST_ROUND_S
        return 503 if is_stuck else 200, {
            "status": "stuck" if is_stuck else "ok",
            "mode": self._mode,
            "is_leader": self._leadership.is_leader,
            "last_observation_s": round(age_s, 3),
            "has_plan": self.last is not None,
        }

    def page(self) -> dict[str, object]:
        """Body of /plan: the last decision, and the problems of the last observation."""
        observed, last = self.observed, self.last
        said: dict[str, Any] = {
            "mode": self._mode,
            "is_leader": self._leadership.is_leader,
            "problems": [] if observed is None else list(observed.problems),
            "plan": None,
        }
        if last is not None:
            said |= _page_of(last)
        return said

    async def _decide(self, observed: ClusterObservation, plan: Plan) -> ScalingDecision:
        before = None if self.last is None else self.last.plan.now
        actions = await self._actuator.apply(plan, observed)
        decision = ScalingDecision(
            observed=observed,
            plan=plan,
            actions=actions,
            is_leader=self._leadership.is_leader,
            ttft_error_ms=error_ms(observed.ttft.share_ms, None if before is None else before.ttft_ms),
            tpot_error_ms=error_ms(observed.tpot.share_ms, None if before is None else before.tpot_ms),
        )
        self.last = decision
        self._metrics.record_decision(decision)
        self._tell(decision)
        return decision

    def _tell(self, decision: ScalingDecision) -> None:
        """Log one line per decision, at level info if it differs from the previous one."""
        plan = decision.plan
        said = (*((one.num_before, one.num_planned, one.outcome) for one in decision.actions), *plan.warnings)
        level = logging.DEBUG if said == self._said else logging.INFO
        self._said = said
        extra = {
            "prefill": plan.num_prefill,
            "decode": plan.num_decode,
            "outcomes": ",".join(one.outcome for one in decision.actions),
            "warnings": "; ".join(plan.warnings),
        }
        _LOG.log(level, "%s", decision.words, extra=extra)

    def _tell_problems(self, problems: Sequence[str]) -> None:
        """Log each problem once while it lasts."""
        now = frozenset(problems)
        for problem in problems:
            if problem not in self._problems:
                _LOG.warning("%s", problem)
        if self._problems and not now:
            _LOG.info("everything is seen again")
        self._problems = now


def _page_of(decision: ScalingDecision) -> Mapping[str, Any]:
    observed = decision.observed
    return {
        "at_s": observed.at_s,
        "plan": as_json(decision.plan),
        "actions": as_json(decision.actions),
        "measured": as_json({"ttft": observed.ttft, "tpot": observed.tpot}),
        "prediction_error": {"ttft_ms": decision.ttft_error_ms, "tpot_ms": decision.tpot_error_ms},
        "observation": as_json(observed.observation),
    }
