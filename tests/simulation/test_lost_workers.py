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
from tests.simulation.mutations import (
    broken_stream_ends_nobody,
    silence_is_not_noticed,
    waits_for_a_third_of_the_grace,
)

BEGIN_S, DIES_AFTER_S, AWAY_S = 4.0, 1.5, 20.0
MOST_AWAY_S = 14.0  # of the 15 s for which a gateway waits
FOUND_AFTER_S = 2.5  # of the return of a worker and a router
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
ONE_WORKER = replace(SCENARIO, decodes=("decode-0",))


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


def away(kind: FaultKind, name: str, *, is_silent: bool = False) -> Fault:
    return Fault(kind, BEGIN_S + DIES_AFTER_S, MOST_AWAY_S, name, size=float(is_silent))


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
    "faults",
    [
        (away(FaultKind.PAUSE, "decode-0"),),
        (away(FaultKind.CRASH, "decode-0", is_silent=True),),
        (away(FaultKind.PAUSE, "router-0"), away(FaultKind.CRASH, "decode-0")),
    ],
    ids=["stood still", "host died", "with its router"],
)
def test_a_stream_of_the_only_worker_goes_on_when_that_is_back_within_the_grace(faults: tuple[Fault, ...]) -> None:
    report = run_scenario(replace(ONE_WORKER, faults=faults))
    assert [outcome.ending for outcome in report.outcomes] == ["whole"] * len(SCENARIO.asks)
    ends_s = [outcome.longest_gap[1] for outcome in report.outcomes]
    back_s = BEGIN_S + DIES_AFTER_S + MOST_AWAY_S
    assert back_s < min(ends_s) < max(ends_s) < back_s + FOUND_AFTER_S


def test_a_failure_counts_although_the_gateway_gave_up_before_the_worker_came_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rule that looked at the 9 s before the failure alone excused it."""
    waits_for_a_third_of_the_grace(monkeypatch)
    fault = replace(away(FaultKind.PAUSE, "decode-0"), for_s=10.0)
    report = run_scenario(replace(ONE_WORKER, faults=(fault,)))
    assert len(report.violations) == len(SCENARIO.asks), report.violations
    assert all("decode-0 and router-0, well since 15.5 s" in violation for violation in report.violations)


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
