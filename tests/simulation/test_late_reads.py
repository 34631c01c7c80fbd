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
from tandem.simulation.scenario import Scenario, _hand_offs
from tests.simulation.mutations import never_confirmed

SEED = 2
BEGIN_S = (2.5, 5.1, 7.7)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """What processes log of the faults done to them is of no interest."""
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
