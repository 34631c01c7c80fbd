"""The embedded store over the life of its process: one gateway at a time, and nothing is lost between two."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from tandem.accounts.accounts import Accounts
from tandem.accounts.charge import Charge, ChargeOutcome, ChargeSettlement, LedgerEntry
from tandem.accounts.embedded import EmbeddedAccounts
from tandem.accounts.errors import AccountsUnavailableError, BudgetExhaustedError
from tandem.accounts.key import AccountKey, KeyLimits
from tandem.accounts.ledger_query import LedgerQuery
from tandem.accounts.open import open_store
from tandem.accounts.prices import Prices
from tandem.accounts.redis_store import RedisAccounts
from tandem.accounts.store import Spending
from tandem.accounts.usage import Usage
from tandem.core.clock import ManualClock
from tandem.core.errors import ConfigurationError

ROOT = Path(__file__).parents[3]
KEY = AccountKey(key_id="k", digest="d", name="a", tenant="t", limits=KeyLimits(budget_nanos=1000))


def settlement(charge_id: str, cost_nanos: int) -> ChargeSettlement:
    entry = LedgerEntry(charge_id, "r", KEY.key_id, KEY.tenant, "m", 0, Usage(1), cost_nanos, "done")
    return ChargeSettlement(entry, KEY.limits.rates, (1, 0, 0), True, (1, 0, 0))


def test_what_was_spent_outlives_the_process(tmp_path: Path) -> None:
    async def first() -> None:
        store = EmbeddedAccounts(tmp_path / "a.db", ManualClock())
        store.start()
        await store.add_key(KEY)
        await store.reserve(Charge("1", KEY, (1, 0, 0), 900))
        await store.settle(settlement("1", 800))
        await store.close()

    async def second() -> None:
        store = EmbeddedAccounts(tmp_path / "a.db", ManualClock())
        store.start()
        with pytest.raises(BudgetExhaustedError):
            await store.reserve(Charge("2", KEY, (1, 0, 0), 201))
        await store.settle(settlement("1", 800))
        assert await store.spending(KEY.key_id) == Spending(800, 0, 0)
        assert list(await store.all_keys()) == [KEY]
        assert len(await store.entries(LedgerQuery())) == 1
        await store.close()

    asyncio.run(first())
    asyncio.run(second())


def test_a_gateway_that_is_killed_loses_nothing_that_was_written(tmp_path: Path) -> None:
    """The writer has what was settled within a moment; then `kill -9`."""
    script = f"""
        import asyncio, sys
        from pathlib import Path
        sys.path.insert(0, {str(ROOT)!r})
        from tests.unit.accounts.test_embedded import *
        async def run():
            store = EmbeddedAccounts(Path({str(tmp_path / "a.db")!r}), ManualClock())
            store.start()
            for number in range(50):
                await store.settle(settlement(str(number), 10))
            await store.entries(LedgerQuery())
            print("settled", flush=True)
            await asyncio.Event().wait()
        asyncio.run(run())
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"settled\n"
        os.kill(process.pid, signal.SIGKILL)

    async def after() -> None:
        store = EmbeddedAccounts(tmp_path / "a.db", ManualClock())
        store.start()
        assert await store.spending(KEY.key_id) == Spending(500, 0, 0)
        assert len(await store.entries(LedgerQuery())) == 50
        await store.close()

    asyncio.run(after())


def test_two_gateways_cannot_share_a_file(tmp_path: Path) -> None:
    async def run() -> None:
        path = tmp_path / "a.db"
        first, second, tool = (EmbeddedAccounts(path, ManualClock()) for _ in range(3))
        first.start()
        with pytest.raises(ConfigurationError, match="another gateway"):
            second.start()
        await tool.add_key(KEY)
        assert KEY.key_id in await first.find_keys([KEY.key_id])
        await tool.revoke_key(KEY.key_id, 1)
        assert not (await first.find_keys([KEY.key_id]))[KEY.key_id].is_live
        for store in (tool, second, first):
            await store.close()

    asyncio.run(run())


def test_files_that_are_something_else_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    path.write_bytes(b"not a database" * 100)
    with pytest.raises(ConfigurationError, match=r"a\.db"):
        EmbeddedAccounts(path, ManualClock())
    with pytest.raises(ConfigurationError, match="missing"):
        EmbeddedAccounts(tmp_path / "missing" / "a.db", ManualClock())


def test_which_store_is_meant(tmp_path: Path) -> None:
    async def run() -> None:
        for where in (str(tmp_path / "a.db"), f"sqlite://{tmp_path}/b.db"):
            store = open_store(where, ManualClock())
            assert isinstance(store, EmbeddedAccounts)
            await store.close()
        redis = open_store("redis://localhost:1/0", ManualClock())
        assert isinstance(redis, RedisAccounts)
        await redis.close()

    asyncio.run(run())
    assert (tmp_path / "b.db").exists()
    with pytest.raises(ConfigurationError):
        open_store("redis://localhost:no", ManualClock())


def test_a_store_that_is_this_process_is_never_told_again(tmp_path: Path) -> None:
    async def run() -> None:
        store, clock = EmbeddedAccounts(tmp_path / "a.db", ManualClock()), ManualClock()
        accounts = Accounts(store, Prices(), clock)
        accounts.start()
        await asyncio.wait_for(accounts.settlements.add(settlement("1", 800)).wait(), 10)
        await accounts.renew()
        assert accounts.settlements.num_accepted == 0
        await accounts.close()

    asyncio.run(run())


def test_a_ledger_that_cannot_be_written_bounds_what_is_served_without_accounts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: such gateways ignore refused reservations, and entries grew in memory for as long as that took."""
    monkeypatch.setattr("tandem.accounts.embedded.MAX_UNWRITTEN", 2)
    monkeypatch.setattr("tandem.accounts.settlements.MAX_WAITING", 3)

    def refuse(entries: object) -> None:
        raise AccountsUnavailableError("the disk is full")

    async def run() -> None:
        store = EmbeddedAccounts(tmp_path / "a.db", ManualClock())
        monkeypatch.setattr(store._file, "add", refuse)
        accounts = Accounts(store, Prices(), ManualClock(), may_be_lost=True)
        accounts.start()
        for number in range(5):
            reservation = accounts.charge(KEY, str(number), "m", Usage())
            await accounts.reserve(reservation)
            await accounts.settle_and_wait(reservation, Usage(1), ChargeOutcome.DONE)
        assert len(store._unwritten) == 2
        with pytest.raises(AccountsUnavailableError, match="too many settlements wait"):
            await accounts.reserve(accounts.charge(KEY, "6", "m", Usage()))
        monkeypatch.undo()
        async with asyncio.timeout(10):
            while accounts.settlements.num_waiting:
                await asyncio.sleep(0.01)
        await accounts.close()

    asyncio.run(run())
    (total,) = asyncio.run(EmbeddedAccounts(tmp_path / "a.db", ManualClock()).totals())
    assert total.num_requests == 5


def test_closing_tries_once_more_to_write_what_was_refused_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: entries were lost at the end if the last attempt before it had failed, though the disk was back."""
    monkeypatch.setattr("tandem.accounts.embedded._RETRY_S", 60.0)
    is_refused = threading.Event()

    def refuse(entries: object) -> None:
        is_refused.set()
        raise AccountsUnavailableError("the disk is full")

    async def run() -> None:
        store = EmbeddedAccounts(tmp_path / "a.db", ManualClock())
        monkeypatch.setattr(store._file, "add", refuse)
        store.start()
        await store.settle(settlement("a", 1))
        assert await asyncio.to_thread(is_refused.wait, 10)
        monkeypatch.undo()
        await store.close()

    asyncio.run(run())
    (total,) = asyncio.run(EmbeddedAccounts(tmp_path / "a.db", ManualClock()).totals())
    assert total.num_requests == 1
