"""Assignment of requests and events to windows."""

import random

import pytest

from tandem.loadtest.failure import UNFINISHED, Failure
from tandem.loadtest.windows import MAX_WINDOWS, windows
from tests.unit.loadtest.outcomes import FAILED, REFUSED, outcome, unanswered


def test_latencies_go_where_a_request_was_due_and_tokens_where_they_came() -> None:
    slow = outcome(0.5, ttft_s=1.0, tpot_s=0.5, tokens=3)  # tokens at 1.5, 2.0 and 2.5
    width_s, (first, second, third) = windows([slow], 1.0, 2.5)
    assert width_s == 1.0
    assert (first.num_due, second.num_due, third.num_due) == (1, 0, 0)
    assert first.ttft_p50_s == first.ttft_p99_s == pytest.approx(1.0)
    assert first.tpot_p50_s == pytest.approx(0.5)
    assert second.ttft_p50_s is None
    assert [window.output_tokens_per_s for window in (first, second, third)] == [0, 1, 2]
    assert [window.num_completed for window in (first, second, third)] == [0, 0, 1]
    assert [window.num_open for window in (first, second, third)] == [1, 1, 0]


def test_a_warm_up_loads_the_server_but_is_not_measured() -> None:
    early = outcome(-0.5, ttft_s=1.0, tpot_s=0.1, tokens=3)
    _, (first,) = windows([early, outcome(-3.0)], 1.0, 1.0)
    assert (first.num_due, first.ttft_p50_s) == (0, None)
    assert first.output_tokens_per_s == 3
    assert (first.num_completed, first.num_open) == (1, 0)


def test_kinds_of_ends() -> None:
    cut = unanswered(0.4, Failure(UNFINISHED, ""), ended_s=0.9)
    _, (first,) = windows([unanswered(0.1, REFUSED), unanswered(0.2, FAILED), cut], 1.0, 1.0)
    assert (first.num_due, first.num_completed, first.num_refused, first.num_failed) == (3, 0, 1, 1)
    assert first.num_open == 0


def test_nothing_is_lost_or_counted_twice() -> None:
    source = random.Random(5)
    outcomes = [outcome(source.uniform(0, 9), ttft_s=source.random(), tokens=source.randint(1, 9)) for _ in range(200)]
    end_s = max(each.ended_s for each in outcomes)
    width_s, found = windows(outcomes, 0.37, end_s)
    assert sum(window.num_due for window in found) == sum(window.num_completed for window in found) == 200
    num_tokens = sum(each.num_output_tokens for each in outcomes)
    assert sum(window.output_tokens_per_s * width_s for window in found) == pytest.approx(num_tokens)


def test_the_last_answer_is_in_the_last_window() -> None:
    """Regression: where the windows ended with it, as those of long tests do, it was in none."""
    _, (first, second) = windows([outcome(0.5, ttft_s=1.5, tokens=1)], 1.0, 2.0)
    assert (first.num_completed, first.num_open) == (0, 1)
    assert (second.num_completed, second.num_open, second.output_tokens_per_s) == (1, 0, 1)


def test_long_tests_get_wider_windows() -> None:
    width_s, found = windows([outcome(99_999.0)], 1.0, 100_000.0)
    assert len(found) == MAX_WINDOWS
    assert width_s == pytest.approx(50.0)
