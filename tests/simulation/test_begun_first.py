"""Turns for free memory: streams whose only worker died, then who has waited longer, at any gateway."""

import logging
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tandem.routing.waiting import WaitingRequests
from tandem.simulation.fault import Fault, FaultKind
from tandem.simulation.run import run_scenario
from tandem.simulation.scenario import ClientRequest
from tests.simulation.test_lost_workers import BEGIN_S, SCENARIO

NUM_BEGUN, NUM_NEW, NUM_SHORT = 6, 12, 60  # of which some six fit into the pool
MOST_BEFORE = 45
GATEWAYS = ("gateway-0", "gateway-1")
DIES_S, BACK_S = BEGIN_S + 1.5, BEGIN_S + 4.5


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Silences the processes' logs of the faults injected into them."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def asked(number: int, at_s: float, owner: str, gateway: str) -> ClientRequest:
    prompt = tuple((37 * number + (number + 3) * index) % 256 for index in range(40))
    return replace(SCENARIO.asks[0], number=number, at_s=at_s, owner=owner, gateway=gateway, prompt=prompt)


def go_on_s(seed: int, begun_at: str, new_at: str) -> tuple[list[float], list[float]]:
    """Times at which begun streams go on and new ones begin; all end whole. `begun_at`, `new_at`: gateways."""
    begun = [asked(n, BEGIN_S + n / 50, "alice", begun_at) for n in range(NUM_BEGUN)]
    new = [asked(NUM_BEGUN + n, DIES_S + 0.1 + n / 20, "bob", new_at) for n in range(NUM_NEW)]
    death = Fault(FaultKind.CRASH, DIES_S, BACK_S - DIES_S, "decode-0")
    report = run_scenario(
        replace(
            SCENARIO,
            seed=seed,
            decodes=("decode-0",),
            gateways=GATEWAYS,
            asks=(*begun, *new),
            num_blocks=64,
            faults=(death,),
        )
    )
    assert not report.violations
    assert {outcome.ending for outcome in report.outcomes} == {"whole"}
    first = {o.ask.request_id: min(at_s for at_s in o.token_times if at_s > BACK_S) for o in report.outcomes}
    times = ([first[ask.request_id] for ask in asks] for asks in (begun, new))
    before, after = (sorted(found) for found in times)
    return before, after


@pytest.mark.parametrize("new_at", GATEWAYS)
@pytest.mark.parametrize("seed", [0, 1])
def test_streams_that_have_begun_go_on_before_others_begin(seed: int, new_at: str) -> None:
    begun, new = go_on_s(seed, "gateway-0", new_at)
    assert begun[-1] < new[0]


@pytest.mark.parametrize("new_at", GATEWAYS)
def test_otherwise_others_take_their_room(new_at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the scenario is one where it matters."""
    monkeypatch.setattr(WaitingRequests, "reserved", lambda self, *question: frozenset())
    begun, new = go_on_s(0, "gateway-0", new_at)
    assert sum(at_s < begun[-1] for at_s in new) > 2


def num_before_long() -> int:
    """Number of short requests of one gateway that begin before the long one of another, which comes early."""
    short = [asked(n, BEGIN_S + n / 20, "alice", "gateway-1") for n in range(NUM_SHORT)]
    prompt = tuple(7 * index % 256 for index in range(190))
    long = replace(asked(NUM_SHORT, BEGIN_S + 1.0, "bob", "gateway-0"), prompt=prompt)
    report = run_scenario(
        replace(SCENARIO, decodes=("decode-0",), gateways=GATEWAYS, asks=(*short, long), num_blocks=64)
    )
    assert not report.violations
    began = {outcome.ask.number: outcome.token_times[0] for outcome in report.outcomes}
    return sum(at_s < began[NUM_SHORT] for at_s in began.values())


def test_short_requests_of_another_gateway_do_not_keep_out_a_long_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the short ones, those that came before it and within a second after it may begin first: some forty."""
    assert num_before_long() < MOST_BEFORE
    monkeypatch.setattr(WaitingRequests, "reserved", lambda self, *question: frozenset())
    assert num_before_long() > MOST_BEFORE
