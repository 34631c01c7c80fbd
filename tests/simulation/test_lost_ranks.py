"""Ranks of a simulated worker that are lost: how long its streams stand still, and what its group does.

Scenarios written by hand: each has one fault, so that each bound is shown by itself.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from tandem.ranks.group import EXCHANGE_DEADLINE_S
from tandem.simulation.fault import Fault, FaultKind
from tandem.simulation.invariants import RANKS_GAP_S
from tandem.simulation.run import Report, run_scenario
from tests.simulation.mutations import (
    idle_group_is_not_watched,
    nobody_hears_of_lost_ranks,
    silent_ranks_are_not_noticed,
    waiting_requests_hear_nothing_of_lost_ranks,
)
from tests.simulation.test_lost_workers import AT_ONCE_S, AWAY_S, BEGIN_S, DIES_AFTER_S, SCENARIO

RANKS = (("prefill-0", 4), ("decode-0", 2))


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Silences the processes' logs of the faults injected into them."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def gap_s(kind: FaultKind, for_s: float = 0.0, other: str = "1", *, decodes: int = 2, size: float = 0.0) -> float:
    """The longest that a stream stood still when something happened to a rank of `decode-0`; all end whole."""
    fault = Fault(kind, BEGIN_S + DIES_AFTER_S, for_s, "decode-0", other, size)
    names = SCENARIO.decodes[:decodes]
    report = run_scenario(replace(SCENARIO, ranks=RANKS, decodes=names, faults=(fault,)))
    assert not report.violations
    assert [outcome.ending for outcome in report.outcomes] == ["whole"] * len(SCENARIO.asks)
    gaps = [until_s - since_s for since_s, until_s in (outcome.longest_gap for outcome in report.outcomes)]
    return max(gaps)


def test_streams_of_a_killed_rank_go_on_elsewhere_at_once() -> None:
    assert gap_s(FaultKind.RANK_KILLED) < AT_ONCE_S


def test_streams_of_the_only_worker_go_on_when_its_group_is_formed_anew() -> None:
    assert AT_ONCE_S < gap_s(FaultKind.RANK_KILLED, decodes=1) < RANKS_GAP_S


def test_streams_of_a_rank_that_stands_still_go_on_elsewhere_after_two_seconds() -> None:
    assert 1.5 < gap_s(FaultKind.RANK_PAUSED, AWAY_S) < RANKS_GAP_S


def test_a_rank_that_stands_still_for_a_moment_is_waited_for() -> None:
    assert 0.9 < gap_s(FaultKind.RANK_PAUSED, 1.0) < 1.5


def test_a_worker_whose_group_cannot_be_formed_is_started_again() -> None:
    assert gap_s(FaultKind.RANKS_REFUSED, 2.0, decodes=1) > AT_ONCE_S


@pytest.mark.parametrize("kind", [FaultKind.RANKS_CUT, FaultKind.RANK_SLOW])
def test_ranks_that_are_parted_or_too_slow_are_lost_at_the_deadline_of_an_exchange(kind: FaultKind) -> None:
    """NOTE: both show that they run all the time."""
    other = "1 0" if kind is FaultKind.RANKS_CUT else "1"
    gap = gap_s(kind, 2 * EXCHANGE_DEADLINE_S, other, size=1e6)
    assert EXCHANGE_DEADLINE_S < gap < EXCHANGE_DEADLINE_S + 1.0


def test_ranks_of_a_worker_that_was_started_again_go_on_when_they_are_no_longer_parted() -> None:
    """The new ranks were not woken, and waited until their exchange's deadline. Seed 5145."""
    began_s = BEGIN_S + DIES_AFTER_S
    cut = Fault(FaultKind.RANKS_CUT, began_s, 6.0, "decode-0", "1 0")
    crash = Fault(FaultKind.CRASH, began_s + 0.1, 1.0, "decode-0")
    report = run_scenario(replace(SCENARIO, ranks=RANKS, decodes=("decode-0",), faults=(cut, crash)))
    assert not report.violations
    assert all(until_s - since_s < 7.0 for since_s, until_s in (outcome.longest_gap for outcome in report.outcomes))


def test_a_rank_whose_silence_nobody_notices_makes_it_late(monkeypatch: pytest.MonkeyPatch) -> None:
    silent_ranks_are_not_noticed(monkeypatch)
    with pytest.raises(AssertionError, match="stood"):
        gap_s(FaultKind.RANK_PAUSED, AWAY_S)


def second_token_s() -> float:
    """Until a client of the only worker has two tokens, which lost a rank while it had no work."""
    fault = Fault(FaultKind.RANK_KILLED, BEGIN_S - 1.5, 0.0, "decode-0", "1")
    lost = replace(SCENARIO, ranks=RANKS, decodes=("decode-0",), asks=SCENARIO.asks[:1], faults=(fault,))
    report = run_scenario(lost)
    assert not report.violations
    (outcome,) = report.outcomes
    assert outcome.ending == "whole"
    return outcome.token_times[1] - outcome.began_s


def test_a_group_that_is_lost_without_work_is_formed_anew_before_there_is_some() -> None:
    assert second_token_s() < 0.4


def test_a_group_that_nobody_watches_is_formed_anew_when_there_is_work(monkeypatch: pytest.MonkeyPatch) -> None:
    idle_group_is_not_watched(monkeypatch)
    assert second_token_s() > 2 * 0.4


def lost_with_requests_waiting() -> Report:
    """The only worker loses a rank while requests wait in its engine for their prompts' KV."""
    asks = tuple(replace(SCENARIO.asks[0], number=number, at_s=BEGIN_S) for number in range(8))
    fault = Fault(FaultKind.RANK_KILLED, BEGIN_S + 0.05, 0.0, "decode-0", "1")
    return run_scenario(replace(SCENARIO, ranks=RANKS, decodes=("decode-0",), asks=asks, faults=(fault,)))


def test_requests_that_wait_when_ranks_are_lost_go_on() -> None:
    report = lost_with_requests_waiting()
    assert not report.violations
    assert [outcome.ending for outcome in report.outcomes] == ["whole"] * 8


@pytest.mark.parametrize("plant", [waiting_requests_hear_nothing_of_lost_ranks, nobody_hears_of_lost_ranks])
def test_requests_that_do_not_hear_of_lost_ranks_wait_for_ever(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a run ends, and says so."""
    plant(monkeypatch)
    assert any(violation.endswith(" waits for ever") for violation in lost_with_requests_waiting().violations)
