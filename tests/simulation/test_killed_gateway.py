"""A gateway that dies during a stream: what it delivered is billed at its last checkpoint, and only that."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tandem.accounts.accounts import Accounts
from tandem.simulation.fabric import NetworkConditions
from tandem.simulation.fault import Fault, FaultKind
from tandem.simulation.redis import STORE
from tandem.simulation.run import run_scenario
from tandem.simulation.scenario import ClientRequest, Scenario
from tests.simulation.mutations import journal_is_not_read, redis_keeps_no_checkpoint

BEGINS_S, DIES_AFTER_S = 4.0, 3.0

STREAM = ClientRequest(
    number=0,
    at_s=BEGINS_S,
    owner="alice",
    gateway="gateway-0",
    prompt=tuple(range(20)),
    max_tokens=60,
    seed=None,
    ignore_eos=True,
    is_stream=True,
)
SCENARIO = Scenario(
    seed=0,
    routers=("router-0",),
    prefills=("prefill-0",),
    decodes=("decode-0",),
    gateways=("gateway-0", "gateway-1"),
    asks=(STREAM,),
    faults=(Fault(FaultKind.CRASH, BEGINS_S + DIES_AFTER_S, 1.0, "gateway-0"),),
    conditions=NetworkConditions(slow_share=0.0, slow_s=0.05),
    num_blocks=40,
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


def test_it_is_billed_at_its_last_checkpoint() -> None:
    report = run_scenario(SCENARIO)
    assert not report.violations
    (outcome,) = report.outcomes
    assert outcome.ending == "gateway died"
    assert 10 < len(outcome.tokens) < STREAM.max_tokens


def test_without_checkpoints_that_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    renewal = Accounts._renewal

    def unchecked(self: Any, held: Any) -> Any:
        return replace(renewal(self, held), checkpoint=None)

    monkeypatch.setattr(Accounts, "_renewal", unchecked)
    (violation,) = run_scenario(SCENARIO).violations
    assert "a renewal before its gateway died and was charged []" in violation


def test_without_checkpoints_in_redis_that_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    redis_keeps_no_checkpoint(monkeypatch)
    (violation,) = run_scenario(SCENARIO).violations
    assert "a renewal before its gateway died and was charged []" in violation


FULL = Fault(FaultKind.DISK_FULL, BEGINS_S + 0.4, 7.0, STORE)
KILLED = Fault(FaultKind.CRASH, BEGINS_S + 5.0, 1.0, "gateway-0")
WITH_JOURNAL = replace(SCENARIO, asks=(replace(STREAM, max_tokens=12),), faults=(FULL, KILLED))


def test_what_a_full_store_refused_is_billed_from_the_journal() -> None:
    """The store takes nothing until its gateway has died; the next one reads what that one left."""
    report = run_scenario(WITH_JOURNAL)
    assert [outcome.ending for outcome in report.outcomes] == ["whole"]
    assert not report.violations


def test_an_unread_journal_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    journal_is_not_read(monkeypatch)
    (violation,) = run_scenario(WITH_JOURNAL).violations
    assert "its gateway died with its journal" in violation
