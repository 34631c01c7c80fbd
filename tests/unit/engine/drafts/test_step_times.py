"""Step times: what is usual of disturbed measurements, and when they are repeated."""

import pytest

from tandem.engine.drafts.pace import Pace
from tandem.engine.drafts.step_times import PlainTimes, StepTimes


def test_disturbed_times_do_not_count_and_others_lie_on_a_line_between() -> None:
    times = StepTimes()
    for seconds in (9.0, 1.0, 1.1, 1.1, 1.1, 30.0):
        times.note(1, seconds)
    times.note(5, 3.1)
    assert times.seconds(1) == 1.1
    assert times.seconds(3) == pytest.approx(2.1)


def test_unknown_rows_are_tried_but_not_far_beyond_what_was_measured() -> None:
    times = StepTimes()
    assert times.seconds(1) == float("inf")
    times.note(16, 1.0)
    assert times.seconds(33) == 1.0
    assert times.seconds(36) == float("inf")


def test_what_was_measured_seldom_is_tried_again_soon() -> None:
    """One disturbed step kept a number of rows from being tried for 256 steps."""
    times = StepTimes()
    times.note(1, 1.0)
    pauses = []
    for _ in range(3):
        times.note(3, 50.0)
        passed = 0
        while times.seconds(3) == 50.0:
            times.note(1, 1.0)
            passed += 1
        pauses.append(passed)
    assert pauses == [8, 32, 128]


def test_steps_without_drafts_are_sure_after_three_and_repeated_more_and_more_seldom() -> None:
    times = PlainTimes()
    pauses = []
    for number in range(1, 8):
        times.note(4, 1.0)
        passed = 0
        while times.is_sure(4):
            times.pass_step(4)
            passed += 1
        pauses.append((number, passed))
    assert pauses == [(1, 0), (2, 0), (3, 8), (4, 16), (5, 32), (6, 64), (7, 64)]


def test_numbers_of_requests_are_corrected_by_their_neighbours() -> None:
    """A batch that changed while other work ran had all its times measured beside it."""
    times = PlainTimes()
    for _ in range(3):
        times.note(4, 1.0)
        times.note(16, 2.0)
    times.note(5, 9.0)
    times.note(15, 9.0)
    assert times.seconds(5) == 1.25
    assert times.seconds(15) == 2.0
    assert times.seconds(7) == 1.75


def test_a_pace_is_that_of_several_steps_and_over_with_one() -> None:
    pace = Pace()
    for ratio in (1.0, 1.0, 1.0, 20.0, 1.0, 3.0):
        pace.note(ratio)
        assert pace.is_usual
    pace.note(3.0)
    pace.note(3.0)
    assert pace.factor == 3.0
    for _ in range(70):
        pace.note(3.0)
    assert pace.lasts
    pace.note(1.0)
    assert pace.is_usual
    assert not pace.lasts
