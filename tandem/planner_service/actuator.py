"""Applies scaling plans: sets replicas, or records why it did not. No other module decides to change them.

Invariant: only the leader writes, only in mode "act" and within the bounds and the budget, and never against another
autoscaler of the same pool. No pool shrinks while part of the cluster could not be observed.
"""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from tandem.core.clock import Clock
from tandem.core.errors import TandemError, UnavailableError
from tandem.kube.errors import ConflictError, KubeUnavailableError
from tandem.planner_service.claim import Claim
from tandem.planner_service.observer import ClusterObservation
from tandem.planner_service.targets import Leadership, Pool, PoolReplicas, ScaleTargets
from tandem.planning.observation import Plan

_LOG = logging.getLogger(__name__)
_WRITE_TIMEOUT_S = 5.0


class ScalingOutcome(StrEnum):
    """Outcome of the plan for one pool.

    ADVISED: the planner may only advise. FOLLOWING: this planner does not lead. BLIND: the pool would shrink while
    something is not observed. YIELDED: another autoscaler scales the pool. BUDGET: the accelerators are in use. AWAY:
    the API or the number of replicas is not available. REFUSED: the API refused the change.
    """

    UNCHANGED = "unchanged"
    WRITTEN = "written"
    ADVISED = "advised"
    FOLLOWING = "following"
    BLIND = "blind"
    YIELDED = "yielded"
    BUDGET = "budget"
    AWAY = "away"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """Result of applying a plan to one pool.

    Args:
        num_before: replicas set before. num_planned: replicas of the plan. num_asked: replicas set now.
        note: reason why a change was not made, or only in part.
    """

    pool: Pool
    num_before: int
    num_planned: int
    num_asked: int
    outcome: ScalingOutcome
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolBounds:
    """Limits of one pool's replicas, both inclusive, and the accelerators of each replica."""

    least: int
    most: int
    num_accelerators: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Limits of what may be applied. `max_step_up`, `max_step_down`: replicas by which one plan may change a pool;
    `max_accelerators`: of both pools together; None = no limit.
    """

    pools: Mapping[Pool, PoolBounds]
    max_step_up: int
    max_step_down: int
    max_accelerators: int | None = None


class Actuator:
    """Applies plans.

    Args:
        acts: whether it may write at all.
        yield_s: time for which a pool is left alone after another autoscaler changed it.
    """

    def __init__(
        self,
        targets: ScaleTargets,
        leadership: Leadership,
        bounds: Bounds,
        clock: Clock,
        *,
        acts: bool,
        yield_s: float,
        write_timeout_s: float = _WRITE_TIMEOUT_S,
    ) -> None:
        self._targets = targets
        self._leadership = leadership
        self._bounds = bounds
        self._clock = clock
        self._acts = acts
        self._write_timeout_s = write_timeout_s
        self._claims = {pool: Claim(yield_s) for pool in Pool}

    async def apply(self, plan: Plan, observed: ClusterObservation) -> tuple[Action, ...]:
        """Applies a plan; a pool that shrinks comes first, to free accelerators. External failures never raise."""
        planned = {Pool.PREFILL: plan.num_prefill, Pool.DECODE: plan.num_decode}
        asked = {pool: _asked_before(pool, observed) for pool in Pool}
        actions: dict[Pool, Action] = {}
        for pool in sorted(Pool, key=lambda one: planned[one] - asked[one]):
            action = await self._apply(pool, planned[pool], asked, observed)
            asked[pool] = action.num_asked
            actions[pool] = action
        return tuple(actions[pool] for pool in Pool)

    async def _apply(
        self, pool: Pool, num_planned: int, asked: Mapping[Pool, int], observed: ClusterObservation
    ) -> Action:
        num_before, seen = asked[pool], observed.replicas.get(pool)
        wanted, note = self._within_bounds(pool, num_planned, num_before)
        target = self._within_budget(pool, wanted, asked) if self._acts else wanted
        outcome, why = await self._do(pool, target, asked, observed, seen)
        if target < wanted and outcome in (ScalingOutcome.UNCHANGED, ScalingOutcome.WRITTEN):
            outcome = ScalingOutcome.BUDGET if outcome is ScalingOutcome.UNCHANGED else outcome
            note = (
                f"{target} of the {num_planned} planned, {self._bounds.max_accelerators} accelerators are taken until "
                "the other pool shrinks"
            )
        return Action(
            pool=pool,
            num_before=num_before,
            num_planned=num_planned,
            num_asked=target if outcome is ScalingOutcome.WRITTEN else num_before,
            outcome=outcome,
            note="; ".join(filter(None, (why, note))),
        )

    async def _do(
        self,
        pool: Pool,
        target: int,
        asked: Mapping[Pool, int],
        observed: ClusterObservation,
        seen: PoolReplicas | None,
    ) -> tuple[ScalingOutcome, str]:
        """Writes `target`, or returns the reason why not."""
        if not self._acts:
            return (ScalingOutcome.UNCHANGED if target == asked[pool] else ScalingOutcome.ADVISED), ""
        if seen is None:
            return ScalingOutcome.AWAY, "how many replicas are asked for is not known"
        claim, now_s = self._claims[pool], self._clock.now_s()
        if not self._leadership.is_leader:
            claim.release()
            return ScalingOutcome.FOLLOWING, "another planner holds the lease, or no planner can get it"
        if seen.num_wanted == 0:  # NOTE: no plan asks for none, so somebody has switched the pool off
            return (
                ScalingOutcome.YIELDED,
                f"somebody else scaled the {pool} pool to 0; it is left alone until it has replicas",
            )
        if claim.is_broken_by(seen.num_wanted, now_s):
            _LOG.warning("%s", _yielding(pool, seen.num_wanted, claim.yields_for_s))
        if claim.yields(now_s):
            return ScalingOutcome.YIELDED, f"somebody else scales the {pool} pool"
        if target == asked[pool]:
            return ScalingOutcome.UNCHANGED, ""
        if target < asked[pool] and observed.problems:
            return ScalingOutcome.BLIND, f"nothing shrinks while something is not seen: {observed.problems[0]}"
        return await self._write(pool, target, seen, claim)

    async def _write(self, pool: Pool, target: int, seen: PoolReplicas, claim: Claim) -> tuple[ScalingOutcome, str]:
        claim.release()  # NOTE: a failed write may have taken effect all the same; the next observation shows it
        try:
            async with asyncio.timeout(self._write_timeout_s):
                await self._targets.write(pool, target, seen)
        except TimeoutError:
            return ScalingOutcome.AWAY, f"writing replicas took longer than {self._write_timeout_s:g} s"
        except (UnavailableError, KubeUnavailableError, ConflictError) as error:
            return ScalingOutcome.AWAY, str(error)
        except TandemError as error:
            return ScalingOutcome.REFUSED, str(error)
        claim.acquire(target, self._clock.now_s())
        return ScalingOutcome.WRITTEN, ""

    def _within_bounds(self, pool: Pool, num_planned: int, num_before: int) -> tuple[int, str]:
        bounds = self._bounds.pools[pool]
        wanted = max(bounds.least, min(bounds.most, num_planned))
        lowest, highest = num_before - self._bounds.max_step_down, num_before + self._bounds.max_step_up
        target = max(bounds.least, lowest, min(bounds.most, highest, wanted))
        return target, "" if target == num_planned else f"{target} of the {num_planned} planned at this step"

    def _within_budget(self, pool: Pool, wanted: int, asked: Mapping[Pool, int]) -> int:
        """Returns `wanted`, limited to the accelerators the other pool leaves; the budget alone shrinks no pool."""
        pools, most = self._bounds.pools, self._bounds.max_accelerators
        if most is None:
            return wanted
        taken = sum(num * pools[other].num_accelerators for other, num in asked.items() if other is not pool)
        return min(wanted, max(asked[pool], (most - taken) // pools[pool].num_accelerators))


def _asked_before(pool: Pool, observed: ClusterObservation) -> int:
    """Replicas requested last; if unknown, those that are ready."""
    if pool in observed.replicas:
        return observed.replicas[pool].num_wanted
    assert observed.observation is not None, "a plan follows from an observation"
    return (observed.observation.prefill if pool is Pool.PREFILL else observed.observation.decode).num_wanted


def _yielding(pool: Pool, num_wanted: int, hold_s: float) -> str:
    return (
        f"somebody else asked for {num_wanted} replicas of the {pool} pool; it is left alone for {hold_s:g} s."
        " Remove the other autoscaler of this pool, or run the planner with mode=advise"
    )
