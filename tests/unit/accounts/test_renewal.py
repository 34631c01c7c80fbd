"""Renewal of reservations against a store that refuses a part of it."""

import asyncio
import logging
from typing import cast

import pytest

from tandem.accounts.accounts import RENEWALS_PER_LEASE, Accounts
from tandem.accounts.errors import AccountsUnavailableError
from tandem.accounts.prices import Prices
from tandem.accounts.store import AccountStore
from tandem.core.clock import ManualClock


class Guarded:
    """Part of an `AccountStore` that says nothing of who answers, as a Redis whose user may not ask it."""

    def __init__(self) -> None:
        self.num_expired = 0
        self.was_asked_twice = asyncio.Event()

    async def renew(self, renewals: object) -> None: ...

    async def expire(self) -> None:
        self.num_expired += 1
        if self.num_expired > 1:
            self.was_asked_twice.set()

    async def incarnation(self) -> str:
        raise AccountsUnavailableError("this user may not ask")


class Buggy(Guarded):
    """Its first renewal fails by a bug."""

    async def renew(self, renewals: object) -> None:
        if not self.num_expired:
            self.num_expired = 1
            raise KeyError("a bug")

    async def incarnation(self) -> str:
        return "one"


def test_a_bug_in_a_renewal_is_logged_and_the_next_comes(caplog: pytest.LogCaptureFixture) -> None:
    """Regression: it ended the task, and nobody was told."""

    async def run() -> None:
        store = Buggy()
        accounts = Accounts(cast(AccountStore, store), Prices(), ManualClock(), lease_s=0.01 * RENEWALS_PER_LEASE)
        renewing = asyncio.create_task(accounts._renew())
        async with asyncio.timeout(10):
            await store.was_asked_twice.wait()
        renewing.cancel()
        await asyncio.gather(renewing, return_exceptions=True)

    asyncio.run(run())
    (record,) = [record for record in caplog.records if record.exc_info]
    assert record.getMessage().startswith("what runs could not be kept set aside; that is tried every")


def test_bills_of_gateways_that_are_gone_are_written_and_the_refusal_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def run() -> Guarded:
        store = Guarded()
        accounts = Accounts(cast(AccountStore, store), Prices(), ManualClock(), lease_s=0.01 * RENEWALS_PER_LEASE)
        renewing = asyncio.create_task(accounts._renew())
        async with asyncio.timeout(10):
            await store.was_asked_twice.wait()
        renewing.cancel()
        await asyncio.gather(renewing, return_exceptions=True)
        return store

    with caplog.at_level(logging.WARNING):
        assert asyncio.run(run()).num_expired > 1
    said = [record.getMessage() for record in caplog.records if "may not ask" in record.getMessage()]
    assert said == ["what runs cannot be kept set aside: this user may not ask"]
