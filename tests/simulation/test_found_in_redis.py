"""Workers that are found in Redis, by routers that start while clocks are wrong.

Scenarios written by hand: a router that knows a worker goes on with it, whatever Redis lists.
"""

import logging
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tandem.simulation.fault import Fault, FaultKind
from tandem.simulation.redis import STORE
from tandem.simulation.run import run_scenario
from tandem.simulation.scenario import Scenario
from tests.simulation.mutations import ends_by_own_clock
from tests.simulation.test_lost_workers import SCENARIO

ROUTER_STARTS_AGAIN = Fault(FaultKind.CRASH, 2.5, 0.3, "router-0")
IN_REDIS = replace(SCENARIO, uses_redis=True)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Silences the processes' logs of the faults injected into them."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def with_faults(*faults: Fault) -> Scenario:
    return replace(IN_REDIS, faults=(*faults, ROUTER_STARTS_AGAIN))


def wrong_clocks(size: float) -> Scenario:
    """Of all workers."""
    names = (*IN_REDIS.prefills, *IN_REDIS.decodes)
    return with_faults(*(Fault(FaultKind.CLOCK, 1.0, 0.0, name, size=size) for name in names))


def endings(scenario: Scenario) -> list[str]:
    report = run_scenario(scenario)
    assert report.violations == []
    return [outcome.ending for outcome in report.outcomes]


@pytest.mark.parametrize(
    "scenario",
    [
        wrong_clocks(-120.0),
        wrong_clocks(120.0),
        with_faults(Fault(FaultKind.STORE_CLOCK, 1.0, 0.0, STORE, size=120.0)),
        with_faults(Fault(FaultKind.STORE_FAILOVER, 1.0, 0.0, STORE, size=5.0)),
    ],
    ids=["clocks behind", "clocks ahead", "Redis' clock ahead", "an empty replica"],
)
def test_a_router_that_starts_finds_all_workers(scenario: Scenario) -> None:
    assert endings(scenario) == ["whole"] * len(SCENARIO.asks)


@pytest.mark.parametrize("size", [-120.0, 120.0])
def test_a_planted_bug_hides_them(size: float, monkeypatch: pytest.MonkeyPatch) -> None:
    ends_by_own_clock(monkeypatch)
    report = run_scenario(wrong_clocks(size))
    assert "whole" not in [outcome.ending for outcome in report.outcomes]
