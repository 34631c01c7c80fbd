"""Gateways over one real Redis that pauses and restarts, gateways that die, clients that leave: the bill is exact.

Every request is settled with what it used; the ledger must have each once, its sums must be what keys spent, budgets
hold, and nothing stays set aside.
"""

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tandem.accounts.accounts import Accounts
from tandem.accounts.charge import ChargeOutcome
from tandem.accounts.embedded import EmbeddedAccounts
from tandem.accounts.journal import Journal
from tandem.accounts.key import AccountKey, KeyLimits, new_key
from tandem.accounts.ledger_query import LedgerQuery
from tandem.accounts.prices import Prices
from tandem.accounts.redis_store import RedisAccounts
from tandem.accounts.store import AccountStore, Spending
from tandem.accounts.usage import Usage
from tandem.core.clock import ManualClock, SystemClock
from tandem.core.errors import TandemError
from tests.helpers.redis_server import RedisServer, running_redis

PRICES = Prices()
MOST = Usage(num_input=40, num_output=60)
ONE = PRICES.cost_nanos(MOST)


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


@dataclass
class Told:
    """Usage by charge as clients know it: of all that were settled, and of those that may have died unsettled."""

    settled: dict[str, tuple[str, Usage]] = field(default_factory=dict)
    maybe: dict[str, tuple[str, Usage]] = field(default_factory=dict)
    refusals: Counter[str] = field(default_factory=Counter)


class Gateway:
    """One gateway's accounts, which can die."""

    def __init__(self, store: AccountStore, journal: Path | None, *, may_be_lost: bool) -> None:
        kept = None if journal is None else Journal(journal)
        self.accounts = Accounts(store, PRICES, SystemClock(), may_be_lost=may_be_lost, journal=kept)
        self.accounts.start()
        self.mine: dict[str, tuple[str, Usage]] = {}
        self.is_dead = False

    async def serve(self, key: AccountKey, draw: random.Random, told: Told) -> None:
        """A request from its arrival to its end, whatever that is."""
        held = self.accounts.charge(key, "request", "tiny", MOST)
        usage = Usage(draw.randrange(30), draw.randrange(4), draw.randrange(3), draw.randrange(3), draw.randrange(60))
        try:
            await self.accounts.reserve(held)
        except TandemError as error:
            told.refusals[type(error).__name__] += 1
            told.maybe[held.charge.charge_id] = (key.key_id, Usage())
            return
        await asyncio.sleep(draw.random() * 0.02)
        if self.is_dead:
            return
        outcome = draw.choice([ChargeOutcome.DONE, ChargeOutcome.DONE, ChargeOutcome.ABORTED, ChargeOutcome.REFUNDED])
        used = Usage() if outcome is ChargeOutcome.REFUNDED else usage
        self.mine[held.charge.charge_id] = (key.key_id, used)
        if outcome is ChargeOutcome.DONE:
            await self.accounts.settle_and_wait(held, used, outcome)
        else:
            self.accounts.settle(held, used, outcome)

    async def die(self, told: Told) -> None:
        """As by kill -9: what it had not told is told by nobody, or by the journal's next reader."""
        self.is_dead = True
        for task in (*self.accounts._tasks, *self.accounts.settlements._senders):
            task.cancel()
        await asyncio.gather(*self.accounts._tasks, *self.accounts.settlements._senders, return_exceptions=True)
        await self.accounts.store.close()
        told.maybe |= self.mine

    async def close(self, told: Told) -> None:
        async with asyncio.timeout(20):
            while self.accounts.settlements.num_waiting:
                await asyncio.sleep(0.01)
        await self.accounts.close()
        told.settled |= self.mine


async def check(store: AccountStore, keys: list[AccountKey], told: Told) -> None:
    entries = await store.entries(LedgerQuery())
    found = {entry.charge_id: (entry.key_id, entry.usage) for entry in entries}
    assert len(found) == len(entries)
    assert told.settled.items() <= found.items()
    assert found.items() <= (told.settled | told.maybe).items()
    totals = await store.totals()
    for key in keys:
        spent = sum(entry.cost_nanos for entry in entries if entry.key_id == key.key_id)
        assert spent == sum(total.cost_nanos for total in totals if total.key_id == key.key_id)
        assert await store.spending(key.key_id) == Spending(spent, 0, 0)
        if key.limits.budget_nanos is not None:
            assert spent <= key.limits.budget_nanos


async def load(gateways: list[Gateway], keys: list[AccountKey], told: Told, seed: int, num_requests: int) -> None:
    draw = random.Random(seed)

    async def client() -> None:
        for _ in range(num_requests):
            gateway = draw.choice([gateway for gateway in gateways if not gateway.is_dead])
            await gateway.serve(draw.choice(keys), draw, told)
            await asyncio.sleep(0.002)

    await asyncio.gather(*(client() for _ in range(16)))


def keys_of() -> list[AccountKey]:
    limits = [
        KeyLimits(),
        KeyLimits(budget_nanos=20 * ONE),
        KeyLimits(concurrency=2, requests_per_minute=2000),
        KeyLimits(input_tokens_per_minute=9000, output_tokens_per_minute=9000, budget_nanos=60 * ONE),
    ]
    return [new_key("k", 1, limits=limit)[0] for limit in limits]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", ["memory", "file"])
def test_one_gateway(tmp_path: Path, kind: str, seed: int) -> None:
    async def run() -> None:
        told, keys = Told(), keys_of()
        store = EmbeddedAccounts(tmp_path / "a.db" if kind == "file" else None, SystemClock())
        gateway = Gateway(store, None, may_be_lost=False)
        await load([gateway], keys, told, seed, 40)
        told.settled |= gateway.mine
        async with asyncio.timeout(10):
            while gateway.accounts.settlements.num_waiting:
                await asyncio.sleep(0.01)
        await check(store, keys, told)
        assert told.refusals
        await gateway.accounts.close()

    asyncio.run(run())


@pytest.mark.parametrize("seed", range(2))
def test_gateways_that_die_and_a_redis_that_is_lost(tmp_path: Path, redis: RedisServer, seed: int) -> None:
    async def run() -> None:
        told, keys, draw = Told(), keys_of(), random.Random(seed)

        def gateway(number: int) -> Gateway:
            store = RedisAccounts(redis.url, SystemClock(), timeout_s=0.3)
            return Gateway(store, tmp_path / f"journal-{number}", may_be_lost=False)

        gateways = [gateway(number) for number in range(3)]

        async def trouble() -> None:
            await asyncio.sleep(0.1)
            with redis.paused():
                await asyncio.sleep(0.5)
            await asyncio.sleep(0.2 + 0.2 * draw.random())
            await gateways[0].die(told)
            gateways.append(gateway(0))
            await asyncio.sleep(0.1)
            restart(redis)
            await asyncio.sleep(0.3)

        async def clients() -> None:
            while not worry.done():
                await load(gateways, keys, told, draw.randrange(2**32), 4)

        await load(gateways, keys[:1], told, seed, 10)
        worry = asyncio.create_task(trouble())
        await asyncio.gather(worry, clients())
        for one in gateways[1:]:
            await one.close(told)
        # NOTE: a minute later, when leases of the dead have ended
        later = RedisAccounts(redis.url, ManualClock(time.time() + 100), uses_local_time=True, timeout_s=5.0)
        await check(later, keys, told)
        assert told.refusals["AccountsUnavailableError"]
        assert gateways[0].mine
        assert len(told.settled) > 50
        await later.close()
        await gateways[0].accounts.store.close()

    asyncio.run(run())


def test_requests_go_on_without_redis_where_they_may(tmp_path: Path, redis: RedisServer) -> None:
    """And nothing is forgotten of what they used, though this gateway ends before Redis is back."""

    async def run() -> None:
        told, key = Told(), new_key("k", 1, limits=KeyLimits(requests_per_minute=10**6))[0]
        draw = random.Random(1)
        first = Gateway(RedisAccounts(redis.url, SystemClock(), timeout_s=0.1), tmp_path / "journal", may_be_lost=True)
        await first.serve(key, draw, told)
        with redis.paused():
            await asyncio.gather(*(first.serve(key, draw, told) for _ in range(50)))
            assert not told.refusals
            await first.accounts.close()
        second = Gateway(RedisAccounts(redis.url, SystemClock(), timeout_s=5.0), tmp_path / "journal", may_be_lost=True)
        second.mine = first.mine
        await second.close(told)
        assert len(told.settled) == 51
        later = RedisAccounts(redis.url, ManualClock(time.time() + 100), uses_local_time=True, timeout_s=5.0)
        await check(later, [key], told)
        await later.close()

    asyncio.run(run())


def test_a_reservation_that_is_cancelled_on_its_way_leaves_nothing(redis: RedisServer) -> None:
    async def run() -> None:
        key = new_key("k", 1, limits=KeyLimits(concurrency=1000))[0]
        accounts = Accounts(RedisAccounts(redis.url, SystemClock(), timeout_s=5.0), PRICES, SystemClock())
        accounts.start()

        async def leave(after: int) -> None:
            held = accounts.charge(key, "request", "tiny", MOST)
            task = asyncio.create_task(accounts.reserve(held))
            for _ in range(after):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            accounts.settle(held, Usage(), ChargeOutcome.ABORTED)

        for _ in range(5):
            await asyncio.gather(*(leave(after) for after in range(40)))
        async with asyncio.timeout(10):
            while accounts.settlements.num_waiting:
                await asyncio.sleep(0.01)
        assert await accounts.store.spending(key.key_id) == Spending(0, 0, 0)
        await accounts.close()

    asyncio.run(run())


def restart(redis: RedisServer) -> None:
    """It writes down what it has and ends, all at once; then it starts again with that."""
    with contextlib.closing(redis.client()) as client:
        client.shutdown(save=True)
    redis.kill()
    redis.start()
