"""Streams whose only worker died: what is free when it is back is theirs, before requests that came meanwhile."""

import logging
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tandem.gateway.outage_queues import OutageQueues
from tandem.simulation.fault import Fault, FaultKind
from tandem.simulation.run import run_scenario
from tandem.simulation.scenario import ClientRequest
from tests.simulation.test_lost_workers import BEGIN_S, SCENARIO

NUM_BEGUN, NUM_NEW = 6, 12  # of which some six fit into the pool
DIES_S, BACK_S = BEGIN_S + 1.5, BEGIN_S + 4.5


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """What processes log of the faults done to them is of no interest."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def asked(number: int, at_s: float, owner: str) -> ClientRequest:
    prompt = tuple((37 * number + (number + 3) * index) % 256 for index in range(40))
    return replace(SCENARIO.asks[0], number=number, at_s=at_s, owner=owner, prompt=prompt)


def go_on_s(seed: int) -> tuple[list[float], list[float]]:
    """When the streams that had begun go on, and when the others begin; all end whole."""
    begun = [asked(n, BEGIN_S + n / 50, "alice") for n in range(NUM_BEGUN)]
    new = [asked(NUM_BEGUN + n, DIES_S + 0.1 + n / 20, "bob") for n in range(NUM_NEW)]
    death = Fault(FaultKind.CRASH, DIES_S, BACK_S - DIES_S, "decode-0")
    report = run_scenario(
        replace(SCENARIO, seed=seed, decodes=("decode-0",), asks=(*begun, *new), num_blocks=64, faults=(death,))
    )
    assert not report.violations
    assert {outcome.ending for outcome in report.outcomes} == {"whole"}
    first = {o.ask.request_id: min(at_s for at_s in o.token_times if at_s > BACK_S) for o in report.outcomes}
    times = ([first[ask.request_id] for ask in asks] for asks in (begun, new))
    before, after = (sorted(found) for found in times)
    return before, after


@pytest.mark.parametrize("seed", [0, 1])
def test_streams_that_have_begun_go_on_before_others_begin(seed: int) -> None:
    begun, new = go_on_s(seed)
    assert begun[-1] < new[0]


def test_otherwise_others_take_their_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the scenario is one where it matters."""
    monkeypatch.setattr(OutageQueues, "lack_room", False)
    begun, new = go_on_s(0)
    assert sum(at_s < begun[-1] for at_s in new) > 2
