"""Prefill workers that die while a decode worker needs them: how soon another computes the prompt, and that no token is
taken from both.

Scenarios written by hand: of the seeds' faults few come between a first token and the KV that belongs to it.
"""

import logging
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tandem.simulation.fault import Fault, FaultKind
from tandem.simulation.run import Report, run_scenario
from tests.simulation.mutations import first_token_taken_again, lost_source_still_used
from tests.simulation.test_lost_workers import AWAY_S, BEGIN_S, SCENARIO

NOTICED_S = 4.0  # more than a probe, its time limit and the prompt once more
SLOW_READ_S = 2.0
SPARES = ("prefill-0", "prefill-1")  # NOTE: which of them is chosen first is left to the router


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Silences the processes' logs of the faults injected into them."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def first_token_s() -> float:
    """Until a client has a token whose prefill worker died in silence before it had computed the prompt."""
    ask = replace(SCENARIO.asks[0], prompt=tuple(range(100)))
    dies = Fault(FaultKind.CRASH, BEGIN_S + 0.05, AWAY_S, "prefill-0", size=1.0)
    report = run_scenario(replace(SCENARIO, asks=(ask,), faults=(dies,), step_s=0.3, lease_ttl_s=4.0))
    assert not report.violations
    (outcome,) = report.outcomes
    assert outcome.ending == "whole"
    return outcome.token_times[0] - outcome.began_s


def test_a_source_that_died_in_silence_is_noticed() -> None:
    assert first_token_s() < NOTICED_S


def test_a_source_that_nobody_asks_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    lost_source_still_used(monkeypatch)
    assert first_token_s() > 2 * NOTICED_S


def run_with_a_spare(dying: str) -> Report:
    """A prefill worker dies when the first token is there and its KV is not; if it was the one, another takes over."""
    ask = replace(SCENARIO.asks[0], prompt=tuple(range(60)), max_tokens=20)
    slow = Fault(FaultKind.SLOW_READS, BEGIN_S - 0.5, 5.0, "everybody", size=SLOW_READ_S)
    dies = Fault(FaultKind.CRASH, BEGIN_S + 0.4, AWAY_S, dying)
    return run_scenario(replace(SCENARIO, asks=(ask,), prefills=SPARES, faults=(slow, dies), lease_ttl_s=4.0))


@pytest.mark.parametrize("dying", SPARES)
def test_the_first_token_of_a_spare_is_not_taken_again(dying: str) -> None:
    report = run_with_a_spare(dying)
    assert not report.violations
    (outcome,) = report.outcomes
    assert outcome.ending == "whole"
    assert outcome.token_times[0] < BEGIN_S + 0.4
    assert outcome.token_times[1] > BEGIN_S + 0.4 + SLOW_READ_S, "it is the spare's"


def test_a_first_token_that_is_taken_again_shows_as_wrong_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    first_token_taken_again(monkeypatch)
    found = [violation for dying in SPARES for violation in run_with_a_spare(dying).violations]
    assert any(", should have got " in violation for violation in found)
