"""Speculation in simulated time: how many guesses it has checked, and what that gains or loses."""

import itertools
import random
from statistics import mean

import pytest

from tandem.core.sampling_params import SamplingParams
from tandem.engine.drafts.allowance import MOST, SHARE
from tandem.engine.drafts.artificial import ReplayDrafter
from tandem.engine.drafts.speculation import Speculation
from tandem.scheduler.output import NewRequest, SampledToken, ScheduledRequest, SchedulerOutput
from tests.helpers.draft_simulation import (
    Cost,
    Disturbances,
    Simulated,
    TimedDrafter,
    answer_of,
    row_cost,
    serve,
    simulate,
)

NUM_STEPS = 250
LEAST_SPEED = 0.97  # of that without drafts
LEAST_DISTURBED = 0.965  # the aim of 0.97 is missed by up to 0.003 in a few cases, see the decision
# what other processes do, see `Disturbances`
KINDS = {
    "noise": {"noise": 0.25},
    "single": {"share": 0.03},
    "bursts": {"bursts": 0.01},
    "first": {"first_s": 50.0},
    "all": {"noise": 0.2, "share": 0.02, "bursts": 0.005},
}


def answers_of(num_requests: int) -> dict[tuple[int, ...], list[int]]:
    return {(index,): answer_of(index, 9 * NUM_STEPS) for index in range(num_requests)}


def run(
    acceptance: float, seconds: Cost, *, num_requests: int = 1, depth_s: float = 0.0, max_drafts: int | None = None
) -> Simulated:
    """`max_drafts`: so many are always checked; None = as many as are chosen."""
    answers = answers_of(num_requests)
    drafter = TimedDrafter(answers, acceptance, depth_s)
    return simulate(drafter, answers, seconds, NUM_STEPS, max_drafts=max_drafts or 7, adapts=max_drafts is None)


def speed(found: Simulated, num_requests: int, seconds: Cost) -> float:
    """Over that without drafts."""
    return found.num_tokens / num_requests * seconds(num_requests) / found.seconds


LOSING = [(1, 0.0, 1.0, 0.3), (1, 0.1, 0.05, 0.0), (5, 0.3, 1.0, 0.3), (5, 0.6, 0.3, 0.3), (1, 0.6, 1.0, 1.0)]
ALL = itertools.product((1, 4, 16), (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0), (0.0, 0.02, 0.1, 0.3, 1.0), (0.0, 0.05, 0.3))
PAYING = [(1, 1.0, 0.05, 0.0), (1, 0.9, 0.05, 0.05), (5, 0.9, 0.05, 0.3), (5, 0.9, 0.3, 0.0)]


@pytest.mark.parametrize(
    ("num_requests", "acceptance", "row_s", "depth_s"),
    [*LOSING, *(pytest.param(*case, marks=pytest.mark.slow) for case in ALL)],
)
def test_nothing_is_slower_than_without_drafts(
    num_requests: int, acceptance: float, row_s: float, depth_s: float
) -> None:
    """From the first step of a worker on, in which neither costs nor acceptance are known."""
    seconds = row_cost(row_s)
    found = run(acceptance, seconds, num_requests=num_requests, depth_s=depth_s)
    assert speed(found, num_requests, seconds) >= LEAST_SPEED


@pytest.mark.parametrize(("num_requests", "acceptance", "row_s", "depth_s"), [*LOSING[:2], (4, 0.7, 0.1, 0.0), *PAYING])
@pytest.mark.parametrize("kind", [None, "noise"])
def test_the_estimate_of_the_time_saved_is_what_was_saved(
    num_requests: int, acceptance: float, row_s: float, depth_s: float, kind: str | None
) -> None:
    """Losses are estimated, too. Times that vary by a quarter make the estimate less exact."""
    answers, seconds = answers_of(num_requests), row_cost(row_s)
    disturbance = None if kind is None else Disturbances(1, **KINDS[kind])
    found = simulate(TimedDrafter(answers, acceptance, depth_s), answers, seconds, NUM_STEPS, disturbance=disturbance)
    saved_s = found.num_tokens / num_requests * seconds(num_requests) - found.seconds
    tolerance_s = 0.005 * found.seconds if kind is None else 0.08 * found.seconds + 0.2 * abs(saved_s)
    assert found.saved_s == pytest.approx(saved_s, abs=tolerance_s)


@pytest.mark.parametrize(("num_requests", "acceptance", "row_s", "depth_s"), PAYING)
def test_what_pays_gains_most_of_what_the_best_length_would(
    num_requests: int, acceptance: float, row_s: float, depth_s: float
) -> None:
    seconds = row_cost(row_s)
    fixed = [
        speed(
            run(acceptance, seconds, num_requests=num_requests, depth_s=depth_s, max_drafts=length),
            num_requests,
            seconds,
        )
        for length in (1, 3, 7)
    ]
    found = speed(run(acceptance, seconds, num_requests=num_requests, depth_s=depth_s), num_requests, seconds)
    assert found >= 0.89 * max(fixed) > 1.1


DISTURBED = [("bursts", 4, 0.3, 1.0, 0.1), ("bursts", 16, 0.6, 0.3, 0.0), ("all", 1, 0.3, 1.0, 0.0)]
GRID = itertools.product(KINDS, (1, 4, 16), (0.0, 0.3, 0.6, 0.9), (0.02, 0.1, 0.3, 1.0), (0.0, 0.1))
SLOW_GRID = [pytest.param(*case, marks=pytest.mark.slow) for case in GRID]


@pytest.mark.parametrize(("kind", "num_requests", "acceptance", "row_s", "depth_s"), [*DISTURBED, *SLOW_GRID])
def test_disturbed_measurements_cost_little(
    kind: str, num_requests: int, acceptance: float, row_s: float, depth_s: float
) -> None:
    """Steps without drafts that were measured beside other work, or before it, made drafts seem cheap: 0.77."""
    seconds, answers = row_cost(row_s), answers_of(num_requests)
    for seed in range(2):
        drafter = TimedDrafter(answers, acceptance, depth_s)
        found = simulate(drafter, answers, seconds, NUM_STEPS, disturbance=Disturbances(seed, **KINDS[kind]))
        assert speed(found, num_requests, seconds) >= LEAST_DISTURBED


CHANGING = [("bursts", 16, 0.6, 1.0, 0.0, 2), ("bursts", 4, 0.3, 1.0, 0.1, 0), ("all", 4, 0.6, 0.1, 0.1, 1)]


@pytest.mark.parametrize(
    ("kind", "most", "acceptance", "row_s", "depth_s", "seed"),
    [*CHANGING, *(pytest.param(*case.values, 0, marks=pytest.mark.slow) for case in SLOW_GRID)],
)
def test_batches_that_change_lose_little(
    kind: str, most: int, acceptance: float, row_s: float, depth_s: float, seed: int
) -> None:
    """Requests join and leave, and most numbers of them are new when other work runs. Without care: 0.78."""
    rng, seconds = random.Random(seed), row_cost(row_s)
    answers: dict[tuple[int, ...], list[int]] = {
        (index,): answer_of(index, rng.randint(10, 120)) for index in range(24)
    }
    arrivals = sorted(rng.randrange(24 * 60) for _ in answers)
    off = serve(answers, arrivals, most, seconds)
    drafter = TimedDrafter(answers, acceptance, depth_s)
    found = serve(answers, arrivals, most, seconds, drafter, Disturbances(seed, **KINDS[kind]))
    assert off.seconds / found.seconds >= LEAST_DISTURBED


@pytest.mark.parametrize("kind", ["single", "bursts", "all"])
@pytest.mark.parametrize(("num_requests", "acceptance", "row_s", "depth_s"), PAYING)
def test_disturbances_do_not_stop_what_pays(
    kind: str, num_requests: int, acceptance: float, row_s: float, depth_s: float
) -> None:
    """One step that took ten times as long used up the allowance for 500 steps: 0.3 of the best speed."""
    seconds, answers = row_cost(row_s), answers_of(num_requests)

    def speed_of(seed: int) -> float:
        drafter = TimedDrafter(answers, acceptance, depth_s)
        found = simulate(drafter, answers, seconds, NUM_STEPS, disturbance=Disturbances(seed, **KINDS[kind]))
        return speed(found, num_requests, seconds)

    best = run(acceptance, seconds, num_requests=num_requests, depth_s=depth_s, max_drafts=7)
    assert mean(map(speed_of, range(4))) >= 0.65 * speed(best, num_requests, seconds)


@pytest.mark.parametrize("acceptance", [0.0, 1.0])
def test_a_first_step_that_takes_long_is_tried_again(acceptance: float) -> None:
    """As on a GPU that compiles kernels: nothing was drafted any more."""
    seconds, answers = row_cost(0.02), answers_of(1)
    drafter = TimedDrafter(answers, acceptance, 0.0)
    found = simulate(drafter, answers, seconds, NUM_STEPS, disturbance=Disturbances(0, **KINDS["first"]))
    assert speed(found, 1, seconds) >= (0.97 if acceptance == 0.0 else 3.0)


def test_acceptance_that_drifts_loses_little() -> None:
    answers, seconds = answers_of(4), row_cost(0.3)
    drafter = TimedDrafter(answers, 0.0, 0.05)

    def drift(number: int) -> None:
        drafter.acceptance = (number // 20 % 4) / 4

    found = simulate(drafter, answers, seconds, NUM_STEPS, before_step=drift, disturbance=Disturbances(0, noise=0.2))
    assert speed(found, 4, seconds) >= LEAST_SPEED


def test_what_pays_is_checked_as_long_as_allowed() -> None:
    lengths = run(1.0, row_cost(0.05)).lengths
    assert sum(length == [7] for length in lengths) > len(lengths) - 12  # but for steps that measure none


def test_less_sure_guesses_are_shorter() -> None:
    lengths = [length for (length,) in run(0.6, row_cost(0.1)).lengths[20:]]
    assert 1 <= sum(lengths) / len(lengths) <= 5


def test_a_drafter_that_costs_and_fails_is_asked_less_and_less() -> None:
    """The time that its first guesses took is made good before it is asked again."""
    answers, num_steps = answers_of(1), 2 * NUM_STEPS
    drafter = TimedDrafter(answers, 0.0, 0.3)
    asked_s: list[float] = []
    simulate(drafter, answers, row_cost(0.05), num_steps, before_step=lambda _: asked_s.append(drafter.now_s))
    asked = [number for number in range(1, num_steps) if asked_s[number] > asked_s[number - 1]]
    assert asked[-1] > num_steps - 100
    assert len([number for number in asked if number > 20]) <= 8


def test_a_drafter_is_timed_by_a_short_guess() -> None:
    """A guess of full length took most of what may be lost, so that short answers ended before drafts had paid."""
    drafter = TimedDrafter(answers_of(1), 0.0, 0.3)
    asked_s: list[float] = []
    simulate(drafter, answers_of(1), row_cost(0.05), NUM_STEPS, before_step=lambda _: asked_s.append(drafter.now_s))
    assert min(second for second in asked_s if second) == pytest.approx(2 * 0.3)


def test_a_change_of_the_texts_costs_a_bounded_time() -> None:
    """After a long time of gains, nothing is right any more."""
    answers = answers_of(1)
    drafter = TimedDrafter(answers, 1.0, 0.2)
    seconds = row_cost(0.5)
    at_change: list[float] = []

    def change(number: int) -> None:
        if number == NUM_STEPS // 2:
            drafter.acceptance = 0.0
            at_change.append(drafter.now_s)

    found = simulate(drafter, answers, seconds, NUM_STEPS, before_step=change)
    after = found.lengths[NUM_STEPS // 2 :]
    lost_s = sum(0.5 * length for (length,) in after[1:]) + drafter.now_s - at_change[0]
    assert lost_s <= seconds(1) * (MOST + 3 + SHARE * len(after))


@pytest.mark.parametrize("depth_s", [0.0, 0.2], ids=["cheap", "costly"])
def test_a_drafter_that_has_become_right_is_noticed(depth_s: float) -> None:
    answers = answers_of(1)
    drafter = TimedDrafter(answers, 0.0, depth_s)

    def change(number: int) -> None:
        drafter.acceptance = float(number >= 60)

    lengths = simulate(drafter, answers, row_cost(0.05), NUM_STEPS, before_step=change).lengths
    assert sum(length for (length,) in lengths[40:60]) <= 1
    assert all(length for (length,) in lengths[-5:])


def test_released_requests_are_forgotten() -> None:
    speculation = Speculation(ReplayDrafter({(1, 2): answer_of(0, 9)}, 100))
    new: tuple[NewRequest, ...] = (NewRequest("r", [1, 2], [], SamplingParams(), 0, frozenset(), b""),)
    step = SchedulerOutput(new, (ScheduledRequest("r", 0, [1, 2], True),), ())
    speculation.begin(step)
    speculation.begin(SchedulerOutput((), (), ("r",)))
    assert not speculation.drafts(step, {"r": [SampledToken(0)]}, 1.0)
