"""Two clocks: from when a request was due, and from when it was sent."""

import pytest

from tandem.loadtest.failure import UNFINISHED, Failure
from tests.unit.loadtest.outcomes import FAILED, REFUSED, outcome, unanswered


def test_waiting_for_the_client_is_waiting_too() -> None:
    late = outcome(1.0, late_s=0.3, ttft_s=0.1)
    assert late.lateness_s == pytest.approx(0.3)
    assert late.served().ttft_s == pytest.approx(0.4)
    assert late.served(from_send=True).ttft_s == pytest.approx(0.1)
    assert late.e2e_s == pytest.approx(0.44)
    assert late.gaps_s == pytest.approx([0.01] * 4)


def test_what_was_not_answered_has_no_end() -> None:
    cut = outcome(1.0, failure=FAILED)
    assert cut.e2e_s is None
    assert not cut.served().completed
    assert not cut.served().rejected
    assert unanswered(1.0, REFUSED).served().rejected
    assert unanswered(1.0, REFUSED).served().ttft_s is None


def test_warm_up_and_unfinished_are_known() -> None:
    assert outcome(-0.1).is_warm_up
    assert not outcome(0.0).is_warm_up
    assert unanswered(0.0, Failure(UNFINISHED, "")).is_unfinished
    assert not unanswered(0.0, FAILED).is_unfinished
