"""Readers that cannot renew a lease while they read: its blocks are used again, so nothing of it may be used.

The faults are written by hand over a seed's requests: the seeds' own faults rarely let a read outlive its lease.
"""

import logging
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tandem.simulation.fault import Fault, FaultKind
from tandem.simulation.run import run_scenario
from tandem.simulation.scenario import WARM_UP_S, Scenario, _hand_offs
from tests.simulation.mutations import confirmed_before_the_read, never_confirmed

SEED = 3
BEGIN_S = (2.5, 5.1, 7.7)
OUTLIVED_SEEDS = (7, 11)  # of two, each enough, since changes of production code move what a seed comes to


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Silences the processes' logs of the faults injected into them."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def scenario() -> Scenario:
    """Slow reads, of a worker that can be read from and not called for longer than a lease of a second."""
    draw, faults = random.Random(SEED), list[Fault]()
    for at_s in BEGIN_S:
        read_s, cut_s, cut_for_s = draw.uniform(0.15, 0.6), draw.uniform(0.1, 0.4), draw.uniform(1.2, 2.2)
        faults.append(Fault(FaultKind.SLOW_READS, at_s, 1.8, "everybody", size=read_s))
        faults.append(Fault(FaultKind.CUT_CALLS, at_s + cut_s, cut_for_s, "decode-0", "prefill-0"))
    return replace(_hand_offs(SEED), faults=tuple(faults))


def test_bytes_that_were_read_too_late_are_not_used() -> None:
    assert not run_scenario(scenario()).violations


def test_without_asking_for_the_lease_wrong_tokens_show(monkeypatch: pytest.MonkeyPatch) -> None:
    never_confirmed(monkeypatch)
    assert any(", should have got " in violation for violation in run_scenario(scenario()).violations)


def outlived(seed: int) -> Scenario:
    """Reads that begin under a lease and end long after it, while others use the source."""
    requests = _hand_offs(seed)
    asks = [replace(ask, at_s=WARM_UP_S + (ask.at_s - WARM_UP_S) / 2) for ask in requests.asks]
    slow = Fault(FaultKind.SLOW_READS, 2.5, 1.5, "everybody", size=2.5)
    cut = Fault(FaultKind.CUT_CALLS, 2.9, 3.0, "decode-0", "prefill-0")
    return replace(requests, asks=tuple(ask for ask in asks if ask.at_s < 5.0), faults=(slow, cut))


@pytest.mark.parametrize("seed", OUTLIVED_SEEDS)
def test_bytes_whose_lease_ended_during_the_read_are_not_used(seed: int) -> None:
    assert not run_scenario(outlived(seed)).violations


def test_asking_for_the_lease_before_the_read_shows_as_wrong_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    confirmed_before_the_read(monkeypatch)
    found = [violation for seed in OUTLIVED_SEEDS for violation in run_scenario(outlived(seed)).violations]
    assert any(", should have got " in violation for violation in found)
