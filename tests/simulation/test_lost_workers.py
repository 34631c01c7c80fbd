"""Delays of a failover: none where the connection broke, a silence where the gateway was not told.

Scenarios written by hand, for bugs that make a failover late and nothing wrong: no seed fails by them.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from tandem.simulation.fabric import NetworkConditions
from tandem.simulation.fault import Fault, FaultKind
from tandem.simulation.run import run_scenario
from tandem.simulation.scenario import ClientRequest, Scenario
from tests.simulation.mutations import broken_stream_ends_nobody, silence_is_not_noticed

BEGIN_S, DIES_AFTER_S, AWAY_S = 4.0, 1.5, 20.0
AT_ONCE_S = 0.75  # less than any silence that a gateway notices
AFTER_SILENCE_S = 4.0  # of a silence and its question, and less than the watch of gRPC on its connections
SCENARIO = Scenario(
    seed=0,
    routers=("router-0",),
    prefills=("prefill-0",),
    decodes=("decode-0", "decode-1"),
    gateways=("gateway-0",),
    asks=tuple(
        ClientRequest(
            number=number,
            at_s=BEGIN_S + number / 10,
            owner="alice",
            gateway="gateway-0",
            prompt=tuple(range(number, number + 20)),
            max_tokens=60,
            seed=None,
            ignore_eos=True,
            is_stream=True,
        )
        for number in range(4)
    ),
    faults=(),
    conditions=NetworkConditions(slow_share=0.0, slow_s=0.05),
    num_blocks=64,
    lease_ttl_s=2.0,
    max_local_tokens=0,
    step_s=0.06,
    account_lease_s=4.0,
    is_open=False,
)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Silences the processes' logs of the faults injected into them."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def crash(*, is_silent: bool) -> Fault:
    return Fault(FaultKind.CRASH, BEGIN_S + DIES_AFTER_S, AWAY_S, "decode-0", size=float(is_silent))


def half_open(told: str, other: str) -> Fault:
    return Fault(FaultKind.HALF_OPEN, BEGIN_S + DIES_AFTER_S, AWAY_S, told, other)


def gap_s(fault: Fault) -> float:
    """The longest that a stream stood still by a fault; all end whole."""
    report = run_scenario(replace(SCENARIO, faults=(fault,)))
    assert [outcome.ending for outcome in report.outcomes] == ["whole"] * len(SCENARIO.asks)
    gaps = [until_s - since_s for since_s, until_s in (outcome.longest_gap for outcome in report.outcomes)]
    return max(gaps)


def test_a_stream_whose_connection_broke_goes_on_at_once() -> None:
    assert gap_s(crash(is_silent=False)) < AT_ONCE_S
    assert gap_s(half_open("gateway-0", "decode-0")) < AT_ONCE_S


def test_a_stream_of_a_silent_worker_goes_on_after_a_silence() -> None:
    assert AT_ONCE_S < gap_s(crash(is_silent=True)) < AFTER_SILENCE_S


def test_a_stream_whose_worker_alone_knows_that_it_is_lost_goes_on_after_a_silence() -> None:
    assert AT_ONCE_S < gap_s(half_open("decode-0", "gateway-0")) < AFTER_SILENCE_S


@pytest.mark.parametrize(
    ("plant", "fault", "most_s"),
    [
        (broken_stream_ends_nobody, crash(is_silent=False), AT_ONCE_S),
        (silence_is_not_noticed, crash(is_silent=True), AFTER_SILENCE_S),
        (silence_is_not_noticed, half_open("decode-0", "gateway-0"), AFTER_SILENCE_S),
    ],
)
def test_a_planted_bug_makes_it_late(
    plant: Callable[[pytest.MonkeyPatch], None], fault: Fault, most_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert gap_s(fault) > most_s
