"""Redis fails over to a replica: clients follow, and what the old master had acknowledged and lost is told again."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress

import pytest
from redis.exceptions import RedisError

from tandem.accounts.accounts import Accounts, Reservation
from tandem.accounts.charge import ChargeOutcome
from tandem.accounts.key import AccountKey, KeyLimits, new_key
from tandem.accounts.ledger_query import LedgerQuery
from tandem.accounts.prices import Prices
from tandem.accounts.redis_store import RedisAccounts
from tandem.accounts.store import Spending
from tandem.accounts.usage import Usage
from tandem.core.clock import SystemClock
from tandem.core.errors import LocalityUnavailableError, UnavailableError
from tandem.gateway.openai.responses.ids import new_response_id
from tandem.gateway.openai.responses.redis_store import RedisResponseStore
from tandem.gateway.openai.responses.sealing import ResponseSealer
from tandem.gateway.openai.responses.store import StoredResponse
from tandem.gateway.pin_book_redis import RedisPinBook
from tandem.locality.base import PublishResult
from tandem.locality.redis import RedisIndex
from tandem.redis_client import answered_within, connect
from tests.faults.streams import PATIENCE_S
from tests.helpers.redis_failover import RedisPair, running_pair, wait_until
from tests.helpers.secret import SECRET

MOST, USED = Usage(num_input=10, num_output=20), Usage(num_input=10, num_output=7)


@pytest.fixture
def pair() -> Iterator[RedisPair]:
    with running_pair() as found:
        yield found


async def eventually(ask: Callable[[], Awaitable[bool]]) -> None:
    """Asked again while Redis is away."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with suppress(UnavailableError, RedisError, OSError):
                if await ask():
                    return
            await asyncio.sleep(0.05)


def test_a_client_of_sentinels_follows_the_master(pair: RedisPair) -> None:
    async def run() -> None:
        client = connect(pair.url)

        async def put(value: str) -> bool:
            async with answered_within(1.0):
                return bool(await client.set("k", value))

        await eventually(lambda: put("old"))
        await asyncio.to_thread(pair.fail_over)
        await eventually(lambda: put("new"))
        with pair.replica.client() as replica:
            assert replica.get("k") == b"new"
        await client.aclose()

    asyncio.run(run())


def test_a_client_of_an_address_leaves_a_master_that_became_a_replica(pair: RedisPair) -> None:
    """As behind a name or a proxy that has moved on: its connections stay with the old master otherwise."""

    async def run() -> None:
        client = connect(pair.master.url)
        number = await client.client_id()
        with pair.master.client() as master:
            master.replicaof("127.0.0.1", str(pair.replica.port))
        with pytest.raises(RedisError, match="read only replica"):
            await client.set("k", "v")
        assert await client.client_id() != number
        await client.aclose()

    asyncio.run(run())


def test_the_locality_index_follows_the_master(pair: RedisPair) -> None:
    index = RedisIndex(pair.url, read_timeout_s=1.0, write_timeout_s=1.0)
    assert index.replace("w", 1, [b"a" * 32], 0) is PublishResult.APPLIED
    pair.fail_over()

    def publish() -> bool:
        with suppress(LocalityUnavailableError):
            return index.replace("w", 1, [b"a" * 32, b"b" * 32], 1) is PublishResult.APPLIED
        return False

    wait_until(publish)
    assert index.stats().num_blocks == 2
    index.close()


def test_pins_and_stored_responses_follow_the_master(pair: RedisPair) -> None:
    """Entries that the replica had are still there, and new ones are added."""
    old, new = (StoredResponse({"id": new_response_id(), "status": "completed", "output": []}, []) for _ in range(2))

    async def run() -> None:
        book = RedisPinBook(pair.url, timeout_s=1.0)
        store = RedisResponseStore(pair.url, ResponseSealer([SECRET]), retry_after_s=0.05)
        await eventually(lambda: told(book.keep({b"old": 60.0})))
        await eventually(lambda: store.put("tenant", old))
        with pair.master.client() as master:
            master.set("last", "1")
            assert master.wait(1, 10_000) == 1
        await asyncio.to_thread(pair.fail_over)
        await eventually(lambda: told(book.keep({b"new": 90.0})))
        await eventually(lambda: store.put("tenant", new))
        assert await book.find([b"old", b"new"]) == [60.0, 90.0]
        assert [await store.find("tenant", each.response_id) for each in (old, new)] == [old, new]
        await book.close()
        await store.close()

    asyncio.run(run())


def test_settlements_that_a_failover_lost_are_in_the_ledger_all_the_same(
    pair: RedisPair, caplog: pytest.LogCaptureFixture
) -> None:
    """The replica had not heard of them when it was promoted; nor of the request that runs."""

    async def run() -> None:
        key = new_key("test", 1, limits=KeyLimits(concurrency=9, budget_nanos=10**9))[0]
        accounts = Accounts(RedisAccounts(pair.url, SystemClock(), timeout_s=1.0), Prices(), SystemClock())
        await accounts.store.add_key(key)
        accounts.start()
        early = await settled(accounts, key)
        running = await reserved(accounts, key)
        await accounts.renew()
        with pair.master.client() as master:
            assert master.wait(1, 10_000) == 1
        await asyncio.to_thread(pair.cut_replication)
        late = [await settled(accounts, key) for _ in range(3)]
        begun = await reserved(accounts, key)
        await asyncio.to_thread(pair.fail_over)
        await eventually(lambda: told(accounts.renew()))
        expected = {held.charge.charge_id for held in (early, *late)}

        async def is_whole() -> bool:
            return {entry.charge_id for entry in await accounts.store.entries(LedgerQuery())} == expected

        await eventually(is_whole)
        spent = 4 * Prices().cost_nanos(USED)
        held_nanos = running.charge.cost_nanos + begun.charge.cost_nanos
        assert await accounts.store.spending(key.key_id) == Spending(spent, held_nanos, 2)
        for held in (running, begun):
            accounts.settle(held, USED, ChargeOutcome.DONE)
        expected |= {held.charge.charge_id for held in (running, begun)}
        await eventually(is_whole)
        assert await accounts.store.spending(key.key_id) == Spending(6 * Prices().cost_nanos(USED), 0, 0)
        assert len(await accounts.store.entries(LedgerQuery())) == 6
        await accounts.close()

    asyncio.run(run())
    assert "another process answers for the store of accounts" in caplog.text


async def told(call: Awaitable[None]) -> bool:
    await call
    return True


async def reserved(accounts: Accounts, key: AccountKey) -> Reservation:
    held = accounts.charge(key, "request", "tiny", MOST)
    await accounts.reserve(held)
    return held


async def settled(accounts: Accounts, key: AccountKey) -> Reservation:
    """A request from its beginning to its end, which the store has acknowledged."""
    held = await reserved(accounts, key)
    has_it = accounts.settle(held, USED, ChargeOutcome.DONE)
    assert has_it is not None
    async with asyncio.timeout(PATIENCE_S):
        await has_it.wait()
    return held
