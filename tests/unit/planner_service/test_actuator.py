import asyncio
import logging

import pytest

from tandem.core.clock import ManualClock
from tandem.core.errors import UnavailableError
from tandem.kube.call import KubeCall
from tandem.kube.errors import ConflictError, ForbiddenError, KubeError, KubeUnavailableError
from tandem.planner_service.actuator import Action, Actuator, Bounds, PoolBounds, ScalingOutcome
from tandem.planner_service.observer import ClusterObservation
from tandem.planning.observation import Plan
from tests.unit.planner_service.builders import D, Deployments, P, Throne, bounds, plan

CALL = KubeCall("patch", "deployments/scale", "ns", "tandem-decode", "apps")


class Body:
    """An actuator with everything it touches."""

    def __init__(
        self, num_prefill: int = 2, num_decode: int = 2, limits: Bounds | None = None, acts: bool = True
    ) -> None:
        self.targets = Deployments(num_prefill, num_decode)
        self.throne = Throne()
        self.clock = ManualClock(1000.0)
        self.actuator = Actuator(
            self.targets,
            self.throne,
            limits or bounds(),
            self.clock,
            acts=acts,
            yield_s=60.0,
            write_timeout_s=0.1,
        )

    def apply(self, wanted: Plan, observed: ClusterObservation | None = None) -> tuple[Action, ...]:
        return asyncio.run(self.actuator.apply(wanted, observed or self.targets.observed()))

    def outcomes(self, wanted: Plan, observed: ClusterObservation | None = None) -> tuple[ScalingOutcome, ...]:
        return tuple(action.outcome for action in self.apply(wanted, observed))


def test_a_leader_writes_what_changes_and_nothing_else() -> None:
    body = Body()
    assert body.outcomes(plan(2, 5)) == (ScalingOutcome.UNCHANGED, ScalingOutcome.WRITTEN)
    assert body.targets.written == [(D, 5)]
    prefill, decode = body.apply(plan(2, 5))
    assert (prefill.outcome, decode.outcome, decode.num_before, decode.num_asked) == ("unchanged", "unchanged", 5, 5)
    assert body.targets.written == [(D, 5)]


def test_advice_is_never_written() -> None:
    body = Body(acts=False)
    assert body.outcomes(plan(2, 5)) == (ScalingOutcome.UNCHANGED, ScalingOutcome.ADVISED)
    assert not body.targets.written


def test_who_does_not_lead_writes_nothing() -> None:
    body = Body()
    body.throne.is_leader = False
    assert body.outcomes(plan(4, 5)) == (ScalingOutcome.FOLLOWING, ScalingOutcome.FOLLOWING)
    assert not body.targets.written
    body.throne.is_leader = True
    assert body.outcomes(plan(4, 5)) == (ScalingOutcome.WRITTEN, ScalingOutcome.WRITTEN)


def test_leadership_that_ends_between_two_writes_stops_the_second() -> None:
    body = Body()

    class Falls(Deployments):
        async def write(self, pool, num_replicas, seen) -> None:  # type: ignore[no-untyped-def]
            await super().write(pool, num_replicas, seen)
            body.throne.is_leader = False

    body.targets = Falls(2, 2)
    body.actuator = Actuator(body.targets, body.throne, bounds(), body.clock, acts=True, yield_s=60.0)
    assert sorted(body.outcomes(plan(4, 5))) == [ScalingOutcome.FOLLOWING, ScalingOutcome.WRITTEN]
    assert len(body.targets.written) == 1


def test_no_plan_leads_beyond_the_bounds() -> None:
    body = Body(2, 2, bounds(least=2, most=4))
    prefill, decode = body.apply(plan(1, 50))
    assert (prefill.num_asked, decode.num_asked) == (2, 4)
    assert body.targets.written == [(D, 4)]
    assert decode.note == "4 of the 50 planned at this step"


def test_steps_are_limited() -> None:
    body = Body(8, 1, bounds(max_step_up=3, max_step_down=2))
    body.apply(plan(1, 9))
    assert body.targets.wanted == {P: 6, D: 4}
    body.apply(plan(1, 9))
    assert body.targets.wanted == {P: 4, D: 7}


def test_a_pool_above_its_bounds_comes_down_step_by_step() -> None:
    body = Body(20, 2, bounds(most=8, max_step_down=2))
    body.apply(plan(8, 2))
    assert body.targets.wanted[P] == 18


def test_nothing_shrinks_while_something_is_not_seen_but_growing_goes_on() -> None:
    body = Body(4, 4)
    prefill, decode = body.apply(plan(2, 6), body.targets.observed("gateway 10.0.0.1:8000 is not counted"))
    assert (prefill.outcome, decode.outcome) == (ScalingOutcome.BLIND, ScalingOutcome.WRITTEN)
    assert "10.0.0.1:8000" in prefill.note
    assert body.targets.wanted == {P: 4, D: 6}
    assert body.outcomes(plan(2, 6)) == (ScalingOutcome.WRITTEN, ScalingOutcome.UNCHANGED)


def test_a_pool_whose_replicas_are_not_known_is_left_alone() -> None:
    body = Body()
    assert body.outcomes(plan(3, 3), body.targets.observed(unknown=D)) == (ScalingOutcome.WRITTEN, ScalingOutcome.AWAY)
    assert body.targets.written == [(P, 3)]


def test_another_autoscaler_is_not_fought(caplog: pytest.LogCaptureFixture) -> None:
    body = Body()
    body.apply(plan(2, 5))
    body.targets.wanted[D] = 3
    with caplog.at_level(logging.WARNING):
        prefill, decode = body.apply(plan(3, 5))
    assert (prefill.outcome, decode.outcome) == (ScalingOutcome.WRITTEN, ScalingOutcome.YIELDED)
    assert (decode.num_before, decode.num_asked) == (3, 3)
    assert "somebody else asked for 3 replicas of the decode pool" in caplog.text
    body.clock.advance(59.0)
    assert body.outcomes(plan(3, 5)) == (ScalingOutcome.UNCHANGED, ScalingOutcome.YIELDED)
    body.clock.advance(2.0)
    assert body.outcomes(plan(3, 5)) == (ScalingOutcome.UNCHANGED, ScalingOutcome.WRITTEN)
    body.targets.wanted[D] = 3
    body.apply(plan(3, 5))
    body.clock.advance(100.0)
    assert body.outcomes(plan(3, 5)) == (ScalingOutcome.UNCHANGED, ScalingOutcome.YIELDED)


def test_a_pool_that_was_switched_off_stays_off_and_is_theirs_when_it_comes_back() -> None:
    """Replicas were asked for again as long as a worker was seen that still ended."""
    body = Body()
    body.apply(plan(2, 5))
    body.targets.wanted[D] = 0
    body.clock.advance(1000.0)
    _, decode = body.apply(plan(2, 5))
    assert (decode.outcome, decode.num_asked) == (ScalingOutcome.YIELDED, 0)
    assert "to 0" in decode.note
    body.targets.wanted[D] = 3
    assert body.outcomes(plan(2, 5)) == (ScalingOutcome.UNCHANGED, ScalingOutcome.YIELDED)
    body.clock.advance(61.0)
    assert body.outcomes(plan(2, 5)) == (ScalingOutcome.UNCHANGED, ScalingOutcome.WRITTEN)


def test_what_was_scaled_before_we_led_is_adopted_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    body = Body()
    body.apply(plan(2, 5))
    body.throne.is_leader = False
    body.targets.wanted[D] = 3
    body.apply(plan(2, 4))
    body.throne.is_leader = True
    assert body.outcomes(plan(2, 4)) == (ScalingOutcome.UNCHANGED, ScalingOutcome.WRITTEN)
    assert "somebody else" not in caplog.text


@pytest.mark.parametrize(
    ("failure", "outcome"),
    [
        (KubeUnavailableError(CALL, "away"), ScalingOutcome.AWAY),
        (ConflictError(CALL, "409"), ScalingOutcome.AWAY),
        (UnavailableError("scaled by somebody else"), ScalingOutcome.AWAY),
        (ForbiddenError(CALL, "403; give the account a Role"), ScalingOutcome.REFUSED),
        (KubeError(CALL, "other"), ScalingOutcome.REFUSED),
    ],
)
def test_a_write_that_fails_is_told_and_tried_again(failure: KubeError, outcome: ScalingOutcome) -> None:
    body = Body()
    body.targets.failure = failure
    _, decode = body.apply(plan(2, 5))
    assert (decode.outcome, decode.num_asked, decode.note) == (outcome, 2, str(failure))
    body.targets.failure = None
    assert body.outcomes(plan(2, 5)) == (ScalingOutcome.UNCHANGED, ScalingOutcome.WRITTEN)


def test_a_write_that_hangs_is_given_up_and_may_have_happened() -> None:
    """The next look shows its number, which is nobody else's doing."""
    body = Body()
    body.apply(plan(2, 4))
    body.targets.is_stalled = True
    _, decode = body.apply(plan(2, 6))
    assert (decode.outcome, decode.note) == (ScalingOutcome.AWAY, "writing replicas took longer than 0.1 s")
    body.targets.is_stalled = False
    body.targets.wanted[D] = 6
    assert body.outcomes(plan(2, 6)) == (ScalingOutcome.UNCHANGED, ScalingOutcome.UNCHANGED)


def test_within_a_budget_one_pool_shrinks_before_the_other_grows() -> None:
    body = Body(4, 4, bounds(max_accelerators=8))
    body.apply(plan(2, 6))
    assert body.targets.written == [(P, 2), (D, 6)]
    body.apply(plan(4, 4))
    assert body.targets.written[2:] == [(D, 4), (P, 4)]


def test_what_the_budget_does_not_pay_waits_for_the_other_pool() -> None:
    pools = {P: PoolBounds(least=1, most=9, num_accelerators=2), D: PoolBounds(least=1, most=9)}
    body = Body(3, 2, bounds(pools=pools, max_accelerators=8))
    prefill, decode = body.apply(plan(2, 4), body.targets.observed("a gateway is away"))
    assert (prefill.outcome, decode.outcome) == (ScalingOutcome.BLIND, ScalingOutcome.BUDGET)
    assert "8 accelerators are taken" in decode.note
    assert body.outcomes(plan(2, 4)) == (ScalingOutcome.WRITTEN, ScalingOutcome.WRITTEN)


def test_a_pool_grows_by_what_the_budget_leaves_while_the_other_cannot_shrink() -> None:
    """It was all or nothing: two accelerators stayed idle for as long as one gateway did not answer."""
    body = Body(4, 4, bounds(max_accelerators=10))
    blind = body.targets.observed("a gateway is away")
    prefill, decode = body.apply(plan(7, 3), blind)
    assert (prefill.outcome, prefill.num_asked, decode.outcome) == (ScalingOutcome.WRITTEN, 6, ScalingOutcome.BLIND)
    assert prefill.note == "6 of the 7 planned, 10 accelerators are taken until the other pool shrinks"
    assert body.outcomes(plan(7, 3), body.targets.observed("a gateway is away")) == (
        ScalingOutcome.BUDGET,
        ScalingOutcome.BLIND,
    )
    assert body.outcomes(plan(7, 3)) == (ScalingOutcome.WRITTEN, ScalingOutcome.WRITTEN)
    assert body.targets.wanted == {P: 7, D: 3}
