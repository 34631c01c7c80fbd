"""A store of accounts that fails over without its last writes: what it had taken is told again.

A scenario written by hand: few failovers of the seeds lose a settlement.
"""

import logging
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tandem.simulation.fault import Fault, FaultKind
from tandem.simulation.redis import STORE
from tandem.simulation.run import Report, run_scenario
from tests.simulation.mutations import lost_settlements_are_not_told_again
from tests.simulation.test_killed_gateway import BEGINS_S, STREAM
from tests.simulation.test_killed_gateway import SCENARIO as WITH_CRASH

ENDS_S = BEGINS_S + 0.85
LAG_S = 0.8


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Silences the processes' logs of the faults injected into them."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def run(after_s: float) -> Report:
    """`after_s`: since the end of the request's stream."""
    failover = Fault(FaultKind.STORE_FAILOVER, ENDS_S + after_s, 0.0, STORE, size=LAG_S)
    report = run_scenario(replace(WITH_CRASH, asks=(replace(STREAM, max_tokens=12),), faults=(failover,)))
    (outcome,) = report.outcomes
    assert outcome.ending == "whole"
    assert outcome.ended_s is not None
    assert ENDS_S - 0.1 < outcome.ended_s < ENDS_S, "the failover comes after the settlement"
    return report


@pytest.mark.parametrize("after_s", [0.3, 0.5])
def test_what_a_failover_lost_is_settled_again(after_s: float) -> None:
    assert run(after_s).violations == []


@pytest.mark.parametrize(
    ("after_s", "charged"),
    [(0.3, "charged []"), (0.5, "a checkpoint although its gateway lives")],
    ids=["its beginning is lost too", "its beginning is kept"],
)
def test_a_planted_bug_bills_it_wrongly(after_s: float, charged: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lost_settlements_are_not_told_again(monkeypatch)
    assert any(charged in violation for violation in run(after_s).violations)
