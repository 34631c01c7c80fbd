"""Planners that scale the simulated pools: what they do unhindered, and what they leave while they cannot see.

Scenarios written by hand; seeds have planners with faults of all kinds.
"""

import logging
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tandem.simulation.fault import Fault, FaultKind
from tandem.simulation.run import Report, run_scenario
from tandem.simulation.scaling import Scaling
from tandem.simulation.seeds import run_seed
from tests.simulation.mutations import shrinks_blindly
from tests.simulation.test_lost_workers import SCENARIO

SCALED = replace(
    SCENARIO,
    gateways=("gateway-0", "gateway-1"),
    scaling=Scaling(max_prefill=2, max_decode=3, budget=5, hold_s=1.0, ttft_ms=5000.0, tpot_ms=500.0, startup_s=0.3),
)
AWAY_S = 14.0


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Silences the processes' logs of the faults injected into them."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def run(*faults: Fault) -> Report:
    report = run_scenario(replace(SCALED, faults=faults))
    assert [outcome.ending for outcome in report.outcomes] == ["whole"] * len(SCENARIO.asks)
    return report


def shrunk_at_s(report: Report) -> list[float]:
    return [write.at_s for write in report.writes if write.after < write.before]


def test_a_pool_grows_and_shrinks_and_its_streams_go_on() -> None:
    report = run()
    assert report.violations == []
    sizes = [(write.deployment, write.before, write.after) for write in report.writes]
    assert sizes == [("decode", 2, 3), ("decode", 3, 2), ("decode", 2, 1)], "more for the burst, then the fewest"


@pytest.mark.parametrize("kind", [FaultKind.PAUSE, FaultKind.CRASH])
def test_nothing_shrinks_while_a_gateway_is_not_seen(kind: FaultKind) -> None:
    report = run(Fault(kind, 2.0, AWAY_S, "gateway-1", size=1.0))
    assert report.violations == []
    assert not [at_s for at_s in shrunk_at_s(report) if at_s < 2.0 + AWAY_S]


def test_a_planted_bug_shrinks_it_and_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    shrinks_blindly(monkeypatch)
    report = run(Fault(FaultKind.PAUSE, 2.0, AWAY_S, "gateway-1"))
    assert any("without gateway-1" in violation for violation in report.violations)


def test_another_planner_goes_on_where_the_leader_died() -> None:
    """Each planner dies silently and comes back, the leader first. At last one leads, which is an invariant."""
    leader, other, died_s = "planner-1", "planner-0", 5.5
    faults = [Fault(FaultKind.CRASH, died_s + 9.0 * n, 5.0, name, size=1.0) for n, name in enumerate((leader, other))]
    report = run(*faults)
    assert report.violations == []
    first, *rest = report.writes
    assert (first.writer, first.before, first.after) == (leader, 2, 3)
    assert first.at_s < died_s
    assert [(write.writer, write.before, write.after) for write in rest] == [(other, 3, 2), (other, 2, 1)]


def test_a_pod_that_is_told_to_end_before_it_begins_does_not_begin() -> None:
    """Regression: its beginning raised an error of the simulation. Seed 30092."""
    assert run_seed(30092).violations == ()
