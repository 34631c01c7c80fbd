"""Every store of accounts: keys, reserve and settle, the ledger; exact under any order, many at once, and when away."""

import asyncio
import contextlib
import json
import random
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from tandem.accounts.charge import Charge, ChargeOutcome, ChargeSettlement, LedgerEntry, Renewal, Total
from tandem.accounts.embedded import EmbeddedAccounts
from tandem.accounts.errors import (
    AccountsUnavailableError,
    BudgetExhaustedError,
    KeyRefusedError,
    LimitExceededError,
)
from tandem.accounts.key import AccountKey, KeyLimits, new_key
from tandem.accounts.ledger_query import LedgerQuery
from tandem.accounts.prices import Prices
from tandem.accounts.rate_limit_state import RateLimitState
from tandem.accounts.redis_store import RedisAccounts
from tandem.accounts.store import AccountStore, Spending
from tandem.accounts.usage import Usage
from tandem.core.clock import ManualClock
from tandem.simulation.redis import SimulatedRedis
from tests.helpers.redis_relay import relay_to
from tests.helpers.redis_server import RedisServer, running_redis

LEASE_S = 10.0
DAY_MS = 24 * 3600 * 1000
KINDS = ("memory", "file", "redis", "simulated redis")
PRICES = Prices()


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


@dataclass(eq=False)
class Bench:
    """A store with a clock that a test moves, and charges by number."""

    store: AccountStore
    clock: ManualClock
    prefix: str = ""
    num_charges: int = 0
    open: dict[str, Charge] = field(default_factory=dict)

    def charge(self, key: AccountKey, num_input: int = 10, num_output: int = 20) -> Charge:
        self.num_charges += 1
        most = Usage(num_input=num_input, num_output=num_output)
        return Charge.of(f"c{self.num_charges}", key, most, PRICES.cost_nanos(most))

    async def reserve(
        self, key: AccountKey, num_input: int = 10, num_output: int = 20
    ) -> tuple[Charge, RateLimitState]:
        charge = self.charge(key, num_input, num_output)
        return charge, await self.store.reserve(charge)

    async def settle(self, charge: Charge, usage: Usage, at_ms: int = 0, *, is_granted: bool = True) -> LedgerEntry:
        settlement = settlement_of(charge, usage, at_ms, is_granted=is_granted)
        await self.store.settle(settlement)
        return settlement.entry


def settlement_of(
    charge: Charge, usage: Usage, at_ms: int = 0, *, is_granted: bool = True, is_refund: bool = False
) -> ChargeSettlement:
    key = charge.key
    outcome = ChargeOutcome.REFUNDED if is_refund else ChargeOutcome.DONE
    entry = LedgerEntry(
        charge.charge_id,
        f"request-{charge.charge_id}",
        key.key_id,
        key.tenant,
        "tiny",
        at_ms,
        usage,
        PRICES.cost_nanos(usage),
        outcome.value,
    )
    used = (int(not is_refund), usage.num_rated_input, usage.num_output)
    return ChargeSettlement(entry, key.limits.rates, charge.amounts, is_granted, used)


def key_with(**limits: Any) -> AccountKey:
    return new_key("test", 1, limits=KeyLimits(**limits))[0]


@contextlib.asynccontextmanager
async def bench_of(kind: str, tmp_path: Path, redis: RedisServer, **options: Any) -> AsyncIterator[Bench]:
    clock, prefix = ManualClock(1000.0), f"{{t{random.getrandbits(64):x}}}"
    async with contextlib.AsyncExitStack() as opened:
        store: AccountStore
        if "redis" in kind:
            url = redis.url if kind == "redis" else await opened.enter_async_context(simulated_redis(clock))
            store = RedisAccounts(
                url, clock, uses_local_time=True, prefix=prefix, lease_s=LEASE_S, timeout_s=5.0, **options
            )
        else:
            path = tmp_path / "accounts.db" if kind == "file" else None
            store = EmbeddedAccounts(path, clock, lease_s=LEASE_S, **options)
        store.start()
        opened.push_async_callback(store.close)
        yield Bench(store, clock, prefix)


@contextlib.asynccontextmanager
async def simulated_redis(clock: ManualClock) -> AsyncIterator[str]:
    """URL of the server of `tandem.simulation`, at a real port."""
    server = SimulatedRedis(clock.now_s)
    loop = asyncio.get_running_loop()
    async with await loop.create_server(server.session, "127.0.0.1", 0) as listening:
        yield f"redis://127.0.0.1:{listening.sockets[0].getsockname()[1]}/0"


Story = Callable[[Bench], Awaitable[None]]


@pytest.fixture(params=KINDS)
def tell(request: pytest.FixtureRequest, tmp_path: Path, redis: RedisServer) -> Callable[..., None]:
    def told(story: Story, **options: Any) -> None:
        async def run() -> None:
            async with bench_of(request.param, tmp_path, redis, **options) as bench:
                await story(bench)

        asyncio.run(run())

    return told


Tell = Callable[..., None]


def test_keys_are_kept_as_they_are_and_revoked_for_good(tell: Tell) -> None:
    async def story(bench: Bench) -> None:
        limits = KeyLimits(
            requests_per_minute=1,
            input_tokens_per_minute=2,
            output_tokens_per_minute=3,
            concurrency=4,
            budget_nanos=5000,
        )
        whole = new_key("a", 1, "x", limits=limits, models=("m",), cache_group="g", is_admin=True)[0]
        plain = new_key("b", 2)[0]
        for key in (whole, plain):
            await bench.store.add_key(key)
        assert await bench.store.find_keys([whole.key_id, "nobody"]) == {whole.key_id: whole}
        assert list(await bench.store.all_keys()) == [whole, plain]
        assert await bench.store.revoke_key(plain.key_id, 7)
        assert await bench.store.revoke_key(plain.key_id, 8)
        assert not await bench.store.revoke_key("nobody", 7)
        assert (await bench.store.find_keys([plain.key_id]))[plain.key_id] == replace(plain, revoked_s=7)
        with pytest.raises(KeyRefusedError, match="revoked"):
            await bench.reserve(plain)
        await bench.reserve(whole, 1, 0)

    tell(story)


def test_only_keys_that_changed_are_decoded_again(tell: Tell) -> None:
    """A gateway asks every second for all keys it knows."""

    async def story(bench: Bench) -> None:
        kept, gone = key_with(), key_with()
        key_ids = [kept.key_id, gone.key_id]
        for key in (kept, gone):
            await bench.store.add_key(key)
        first = await bench.store.find_keys(key_ids)
        await bench.store.revoke_key(gone.key_id, 7)
        second = await bench.store.find_keys(key_ids)
        assert second[kept.key_id] is first[kept.key_id]
        assert second[gone.key_id] == replace(gone, revoked_s=7)

    tell(story)


def test_the_ledger_is_decoded_beside_the_event_loop(tell: Tell, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[int] = set()
    loads = json.loads

    def noted(value: str | bytes) -> Any:
        threads.add(threading.get_ident())
        return loads(value)

    async def story(bench: Bench) -> None:
        charge, _ = await bench.reserve(key_with())
        entry = await bench.settle(charge, Usage(num_input=1, num_output=2))
        monkeypatch.setattr(json, "loads", noted)
        assert list(await bench.store.entries(LedgerQuery())) == [entry]
        assert [total.num_requests for total in await bench.store.totals()] == [1]
        assert threads
        assert threading.get_ident() not in threads

    tell(story)


def test_what_was_set_aside_and_not_used_comes_back(tell: Tell) -> None:
    async def story(bench: Bench) -> None:
        key = key_with(requests_per_minute=10, input_tokens_per_minute=100, output_tokens_per_minute=200)
        charge, rate_limits = await bench.reserve(key, 30, 50)
        assert rate_limits.requests is not None
        assert rate_limits.input_tokens is not None
        assert rate_limits.output_tokens is not None
        assert (rate_limits.requests.limit, rate_limits.requests.remaining, rate_limits.requests.reset_s) == (
            10,
            9,
            6.0,
        )
        assert (rate_limits.input_tokens.remaining, rate_limits.input_tokens.reset_s) == (70, 18.0)
        assert (rate_limits.output_tokens.remaining, rate_limits.tokens) == (150, rate_limits.input_tokens)
        await bench.settle(charge, Usage(num_input=10, num_read=20, num_output=5))
        _, after = await bench.reserve(key, 0, 0)
        assert after.requests is not None
        assert after.input_tokens is not None
        assert after.output_tokens is not None
        assert (after.requests.remaining, after.input_tokens.remaining) == (8, 90)
        assert after.output_tokens.remaining == 195

    tell(story)


def test_a_refund_gives_everything_back(tell: Tell) -> None:
    async def story(bench: Bench) -> None:
        key = key_with(requests_per_minute=1, input_tokens_per_minute=10, output_tokens_per_minute=20)
        for _ in range(3):
            charge, _ = await bench.reserve(key)
            await bench.store.settle(settlement_of(charge, Usage(), is_refund=True))
        assert await bench.store.spending(key.key_id) == Spending(0, 0, 0)

    tell(story)


@pytest.mark.parametrize("limit", ["requests", "input_tokens", "output_tokens"])
def test_buckets_refill_all_the_time_and_say_exactly_when(tell: Tell, limit: str) -> None:
    async def story(bench: Bench) -> None:
        key = key_with(**{f"{limit}_per_minute": 7})
        wanted = (0, 0) if limit == "requests" else (3, 3)
        for _ in range(7 if limit == "requests" else 2):
            await bench.reserve(key, *wanted)
        with pytest.raises(LimitExceededError, match=limit.replace("_", " ")) as refused:
            await bench.reserve(key, *wanted)
        missing = 1 if limit == "requests" else 2
        assert refused.value.limit == limit
        assert refused.value.retry_after_s == pytest.approx(60 / 7 * missing)
        assert refused.value.rate_limits is not None
        bench.clock.advance(60 / 7 * missing - 0.002)
        with pytest.raises(LimitExceededError):
            await bench.reserve(key, *wanted)
        bench.clock.advance(0.003)
        await bench.reserve(key, *wanted)
        bench.clock.advance(1e6)
        _, full = await bench.reserve(key, *wanted)
        window = getattr(full, limit)
        assert window.remaining == 7 - (1 if limit == "requests" else 3)

    tell(story)


def test_a_request_of_more_than_a_minute_takes_a_full_bucket(tell: Tell) -> None:
    """And what it really took beyond that stops at zero."""

    async def story(bench: Bench) -> None:
        key = key_with(input_tokens_per_minute=60, output_tokens_per_minute=60)
        charge, rate_limits = await bench.reserve(key, 1000, 1000)
        assert charge.amounts == (1, 60, 60)
        assert rate_limits.tokens is not None
        assert rate_limits.tokens.remaining == 0
        bench.clock.advance(30)
        await bench.settle(charge, Usage(num_input=1, num_read=999, num_output=1000))
        with pytest.raises(LimitExceededError, match="output tokens") as refused:
            await bench.reserve(key, 60, 1)
        assert refused.value.retry_after_s == pytest.approx(1.0)

    tell(story)


def test_so_many_at_once_and_no_more(tell: Tell) -> None:
    async def story(bench: Bench) -> None:
        key = key_with(concurrency=2)
        first, _ = await bench.reserve(key)
        await bench.reserve(key)
        with pytest.raises(LimitExceededError, match="2 requests running"):
            await bench.reserve(key)
        await bench.settle(first, Usage(num_output=1))
        await bench.reserve(key)
        assert (await bench.store.spending(key.key_id)).num_open == 2

    tell(story)


def test_a_budget_covers_what_runs_and_what_was_spent(tell: Tell) -> None:
    async def story(bench: Bench) -> None:
        one = PRICES.cost_nanos(Usage(num_input=10, num_output=20))
        key = key_with(budget_nanos=2 * one)
        first, _ = await bench.reserve(key)
        second, _ = await bench.reserve(key)
        with pytest.raises(BudgetExhaustedError, match=r"0 of the key's budget of 0\.00022 is left"):
            await bench.reserve(key)
        await bench.settle(first, Usage(num_input=10, num_output=20))
        with pytest.raises(BudgetExhaustedError):
            await bench.reserve(key, 1, 0)
        await bench.settle(second, Usage(num_input=10))
        await bench.reserve(key, 0, 20)
        assert await bench.store.spending(key.key_id) == Spending(one + 10_000, 100_000, 1)

    tell(story)


def test_told_twice_is_counted_once(tell: Tell) -> None:
    async def story(bench: Bench) -> None:
        key = key_with(output_tokens_per_minute=100)
        charge, _ = await bench.reserve(key)
        for _ in range(3):
            entry = await bench.settle(charge, Usage(num_input=10, num_output=20))
        assert await bench.store.entries(LedgerQuery()) == [entry]
        assert (await bench.store.spending(key.key_id)).spent_nanos == entry.cost_nanos
        (total,) = await bench.store.totals()
        assert (total.num_requests, total.cost_nanos) == (1, entry.cost_nanos)

    tell(story)


def test_what_was_never_granted_is_still_paid(tell: Tell) -> None:
    """A request that went on while the store was away: its rates give nothing back that was never taken."""

    async def story(bench: Bench) -> None:
        key = key_with(output_tokens_per_minute=100)
        await bench.reserve(key, 0, 50)
        await bench.settle(bench.charge(key, 0, 50), Usage(num_output=10), is_granted=False)
        _, rate_limits = await bench.reserve(key, 0, 0)
        assert rate_limits.output_tokens is not None
        assert rate_limits.output_tokens.remaining == 40

    tell(story)


def test_what_nobody_renews_comes_back(tell: Tell) -> None:
    async def story(bench: Bench) -> None:
        key = key_with(concurrency=2, budget_nanos=10**9)
        lost, _ = await bench.reserve(key)
        alive, _ = await bench.reserve(key)
        bench.clock.advance(LEASE_S * 0.9)
        await bench.store.renew([Renewal(alive, is_granted=True)])
        bench.clock.advance(LEASE_S * 0.2)
        assert await bench.store.spending(key.key_id) == Spending(0, alive.cost_nanos, 1)
        again, _ = await bench.reserve(key)
        await bench.store.renew([Renewal(lost, is_granted=False)])
        with pytest.raises(LimitExceededError):
            await bench.reserve(key)
        entry = await bench.settle(lost, Usage(num_input=10, num_output=3))
        assert await bench.store.spending(key.key_id) == Spending(entry.cost_nanos, 2 * again.cost_nanos, 2)

    tell(story)


def renewal(charge: Charge, usage: Usage | None = None, at_ms: int = 0) -> Renewal:
    if usage is None:
        return Renewal(charge, is_granted=True)
    entry = settlement_of(charge, usage, at_ms).entry
    return Renewal(charge, is_granted=True, checkpoint=replace(entry, outcome=ChargeOutcome.EXPIRED.value))


async def assert_ledger(bench: Bench, key: AccountKey, *expected: tuple[str, str, Usage], num_open: int = 0) -> None:
    """Charge, outcome and usage of each entry, in order; what was spent and the totals are their sums."""
    entries = await bench.store.entries(LedgerQuery())
    assert [(entry.charge_id, entry.outcome, entry.usage) for entry in entries] == list(expected)
    spent = sum(PRICES.cost_nanos(usage) for _, _, usage in expected)
    spending = await bench.store.spending(key.key_id)
    assert (spending.spent_nanos, spending.num_open) == (spent, num_open)
    totals = [total for total in await bench.store.totals() if total.num_requests]
    assert sum(total.cost_nanos for total in totals) == spent
    assert sum(total.num_requests for total in totals) == len(expected)
    assert sum((total.usage for total in totals), Usage()) == sum((usage for _, _, usage in expected), Usage())


SOME, MORE, ALL = (Usage(num_input=10, num_read=num, num_output=num) for num in (3, 7, 12))


@pytest.mark.parametrize("kind", ["file", "redis", "simulated redis"])
def test_what_a_killed_gateway_delivered_is_billed_as_it_last_said(
    kind: str, tmp_path: Path, redis: RedisServer
) -> None:
    """It was billed to nobody. Nobody asks for the key again: another gateway, or the next one, finds it."""

    async def story() -> None:
        key = key_with(concurrency=9, budget_nanos=10**9)
        async with contextlib.AsyncExitStack() as opened:
            bench = await opened.enter_async_context(bench_of(kind, tmp_path, redis))
            charges = [(await bench.reserve(key))[0] for _ in range(3)]
            await bench.store.renew([renewal(charges[0], SOME), renewal(charges[1]), renewal(charges[2], SOME)])
            bench.clock.advance(LEASE_S * 0.9)
            await bench.store.renew([renewal(charges[0], MORE)])
            await bench.settle(charges[2], ALL)
            bench.clock.advance(LEASE_S * 1.1)
            if kind == "file":
                assert isinstance(bench.store, EmbeddedAccounts)
                await opened.aclose()
                bench = await opened.enter_async_context(bench_of(kind, tmp_path, redis))
            await bench.store.expire()
            entries = {entry.charge_id for entry in await bench.store.entries(LedgerQuery())}
            assert entries == {"c1", "c3"}, "before anybody asked for this key"
            await assert_ledger(bench, key, ("c3", "done", ALL), ("c1", "expired", MORE))
            await bench.store.expire()
            await assert_ledger(bench, key, ("c3", "done", ALL), ("c1", "expired", MORE))

    asyncio.run(story())


@pytest.mark.parametrize("kind", ["file", "redis", "simulated redis"])
def test_a_settlement_after_the_checkpoint_was_billed_corrects_it(
    kind: str, tmp_path: Path, redis: RedisServer
) -> None:
    async def story() -> None:
        key = key_with(budget_nanos=10**9)
        async with contextlib.AsyncExitStack() as opened:
            bench = await opened.enter_async_context(bench_of(kind, tmp_path, redis))
            more, less = [(await bench.reserve(key))[0] for _ in range(2)]
            await bench.store.renew([renewal(more, SOME), renewal(less, MORE, DAY_MS)])
            bench.clock.advance(LEASE_S * 1.1)
            if kind == "file":
                await opened.aclose()
                bench = await opened.enter_async_context(bench_of(kind, tmp_path, redis))
            await bench.store.expire()
            await assert_ledger(bench, key, ("c1", "expired", SOME), ("c2", "expired", MORE))
            for _ in range(2):
                await bench.settle(more, ALL, DAY_MS)
                await bench.store.settle(settlement_of(less, Usage(), is_refund=True))
                await assert_ledger(bench, key, ("c1", "done", ALL), ("c2", "refunded", Usage()))
            await bench.store.renew([Renewal(more, is_granted=False)])
            await assert_ledger(bench, key, ("c1", "done", ALL), ("c2", "refunded", Usage()))

    asyncio.run(story())


def test_a_request_that_was_taken_for_lost_is_set_aside_again_once_it_is_renewed(tell: Tell) -> None:
    """A clock that jumps ahead ends all leases; the requests still run, and are billed once, by their end."""

    async def story(bench: Bench) -> None:
        key = key_with(concurrency=2, budget_nanos=10**9)
        charge, _ = await bench.reserve(key)
        await bench.store.renew([renewal(charge, SOME)])
        bench.clock.advance(LEASE_S * 1000)
        assert (await bench.store.spending(key.key_id)).num_open == 0
        await bench.store.renew([renewal(charge, MORE)])
        assert await bench.store.spending(key.key_id) == Spending(0, charge.cost_nanos, 1)
        await assert_ledger(bench, key, num_open=1)
        await bench.settle(charge, ALL)
        await assert_ledger(bench, key, ("c1", "done", ALL))
        await bench.store.renew([renewal(charge, MORE)])
        await assert_ledger(bench, key, ("c1", "done", ALL))

    tell(story)


@pytest.mark.parametrize("seed", range(4))
def test_each_charge_is_billed_once_in_any_order_of_renewals_ends_and_jumps(redis: RedisServer, seed: int) -> None:
    """Against a dictionary: the last word about each charge is its settlement, or else its checkpoint once expired."""
    draw = random.Random(seed)

    async def story() -> None:
        async with bench_of("redis", Path(), redis) as bench:
            key = key_with(budget_nanos=10**12)
            until: dict[str, tuple[Charge, float]] = {}
            checkpoints: dict[str, Usage] = {}
            billed: dict[str, tuple[str, Usage]] = {}
            charges: list[Charge] = []
            begun: set[str] = set()
            for _ in range(300):
                bench.clock.advance(draw.choice([0, 0.5, 3, 3 * LEASE_S]))
                now_s = bench.clock.now_s()
                for charge, end_s in list(until.values()):
                    if end_s <= now_s:
                        del until[charge.charge_id]
                        if (usage := checkpoints.pop(charge.charge_id, None)) is not None:
                            billed[charge.charge_id] = ("expired", usage)
                usage = Usage(*(draw.randrange(300) for _ in range(5)))
                charge = draw.choice(charges) if charges and draw.random() < 0.7 else bench.charge(key)
                is_final = billed.get(charge.charge_id, ("", Usage()))[0] == "done"
                if charge not in charges:
                    charges.append(charge)
                    await bench.store.reserve(charge)
                    until[charge.charge_id] = (charge, now_s + LEASE_S)
                elif draw.random() < 0.7:
                    with_checkpoint = charge.charge_id in begun or draw.random() < 0.5
                    begun |= {charge.charge_id} if with_checkpoint else set()
                    await bench.store.renew([renewal(charge, usage if with_checkpoint else None)])
                    if not is_final:
                        until[charge.charge_id] = (charge, now_s + LEASE_S)
                        billed.pop(charge.charge_id, None)
                        if with_checkpoint:
                            checkpoints[charge.charge_id] = usage
                else:
                    await bench.settle(charge, usage)
                    if not is_final:
                        billed[charge.charge_id] = ("done", usage)
                        until.pop(charge.charge_id, None)
                        checkpoints.pop(charge.charge_id, None)
                await bench.store.expire()
                spent = sum(PRICES.cost_nanos(each) for _, each in billed.values())
                held = sum(each.cost_nanos for each, _ in until.values())
                assert await bench.store.spending(key.key_id) == Spending(spent, held, len(until))
            entries = await bench.store.entries(LedgerQuery())
            assert {e.charge_id: (e.outcome, e.usage) for e in entries} == billed
            assert len(entries) == len(billed)
            assert sum(total.cost_nanos for total in await bench.store.totals()) == spent
            assert {outcome for outcome, _ in billed.values()} == {"done", "expired"}

    asyncio.run(story())


def test_the_ledger_is_found_by_day_key_and_tenant(tell: Tell) -> None:
    async def story(bench: Bench) -> None:
        a, b = key_with(), key_with()
        usages = [Usage(1, 2, 3, 4, 5), Usage(10, 0, 0, 0, 1), Usage(0, 0, 0, 9, 2), Usage(7, 7, 7, 7, 7)]
        whose = [(a, 0), (b, 0), (a, DAY_MS), (a, DAY_MS + 1)]
        made = [
            await bench.settle((await bench.reserve(key))[0], usage, at_ms)
            for (key, at_ms), usage in zip(whose, usages, strict=True)
        ]
        find, days = bench.store.entries, ("1970-01-01", "1970-01-02")
        assert await find(LedgerQuery()) == made
        assert await find(LedgerQuery(key_id=b.key_id)) == made[1:2]
        assert await find(LedgerQuery(tenant=a.tenant, since_day=days[1])) == made[2:]
        assert await find(LedgerQuery(until_day=days[0])) == made[:2]
        assert await find(LedgerQuery(limit=1)) == made[3:]
        totals = await bench.store.totals()
        expected = [
            Total(days[0], a.key_id, a.tenant, "tiny", 1, usages[0], made[0].cost_nanos),
            Total(days[0], b.key_id, b.tenant, "tiny", 1, usages[1], made[1].cost_nanos),
            Total(
                days[1], a.key_id, a.tenant, "tiny", 2, usages[2] + usages[3], made[2].cost_nanos + made[3].cost_nanos
            ),
        ]
        assert sorted(totals, key=repr) == sorted(expected, key=repr)
        assert await bench.store.totals(since_day=days[1]) == expected[2:]

    tell(story)


def test_the_ledger_forgets_old_entries_but_not_their_sums(tell: Tell) -> None:
    async def story(bench: Bench) -> None:
        key = key_with()
        for _ in range(2300):
            await bench.settle(bench.charge(key), Usage(num_input=1), 10**14, is_granted=False)
        entries = await bench.store.entries(LedgerQuery())
        assert len(entries) < 2300
        assert entries[-1].charge_id == "c2300"
        assert (await bench.store.spending(key.key_id)).spent_nanos == 2_300_000
        assert [total.usage for total in await bench.store.totals()] == [Usage(num_input=2300)]

    tell(story, max_entries=100)


class Oracle:
    """The rules in exact fractions, as plainly as they can be said."""

    def __init__(self, limits: KeyLimits, now_ms: int) -> None:
        self.limits = limits
        self.levels = [Fraction(rate or 0) for rate in limits.rates]
        self.at_ms = now_ms
        self.open: dict[str, tuple[Charge, int]] = {}
        self.settled: set[str] = set()
        self.spent = 0

    def move(self, now_ms: int) -> None:
        for index, rate in enumerate(self.limits.rates):
            if rate is not None:
                self.levels[index] = min(
                    Fraction(rate), self.levels[index] + Fraction(rate * (now_ms - self.at_ms), 60_000)
                )
        self.at_ms = now_ms
        self.open = {name: (charge, end) for name, (charge, end) in self.open.items() if end > now_ms}

    @property
    def held(self) -> int:
        return sum(charge.cost_nanos for charge, _ in self.open.values())

    def reserve(self, charge: Charge) -> str | None:
        limits = self.limits
        if limits.budget_nanos is not None and charge.cost_nanos > max(0, limits.budget_nanos - self.spent - self.held):
            return "budget"
        if limits.concurrency is not None and len(self.open) >= limits.concurrency:
            return "concurrency"
        for index, name in enumerate(("requests", "input_tokens", "output_tokens")):
            if limits.rates[index] is not None and charge.amounts[index] > self.levels[index]:
                return name
        for index, rate in enumerate(limits.rates):
            self.levels[index] -= charge.amounts[index] if rate is not None else 0
        self.open[charge.charge_id] = (charge, self.at_ms + round(LEASE_S * 1000))
        return None

    def settle(self, settlement: ChargeSettlement) -> None:
        name = settlement.entry.charge_id
        if name in self.settled:
            return
        self.settled.add(name)
        known = self.open.pop(name, None) is not None or settlement.is_granted
        for index, rate in enumerate(self.limits.rates):
            if rate is not None:
                back = (settlement.reserved[index] if known else 0) - settlement.used[index]
                self.levels[index] = max(Fraction(0), min(Fraction(rate), self.levels[index] + back))
        self.spent += settlement.entry.cost_nanos


@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_anything_is_as_the_rules_say(tell: Tell, seed: int) -> None:
    draw = random.Random(seed)

    async def story(bench: Bench) -> None:
        key = key_with(
            requests_per_minute=draw.choice([None, 37]),
            input_tokens_per_minute=draw.choice([None, 997]),
            output_tokens_per_minute=draw.choice([None, 1009]),
            concurrency=draw.choice([None, 5]),
            budget_nanos=draw.choice([None, 60_000_000]),
        )
        oracle = Oracle(key.limits, round(bench.clock.now_s() * 1000))
        granted: list[Charge] = []
        told: list[ChargeSettlement] = []
        for _ in range(400):
            bench.clock.advance(draw.choice([0, 0, 0.25, 1.5, 4]))
            oracle.move(round(bench.clock.now_s() * 1000))
            action = draw.random()
            if action < 0.45:
                charge = bench.charge(key, draw.randrange(1200), draw.randrange(1200))
                expected = oracle.reserve(charge)
                assert await refusal_of(bench.store, charge) == expected
                granted += [charge] if expected is None else []
            elif action < 0.85 and granted:
                charge = granted.pop(draw.randrange(len(granted)))
                usage = Usage(*(draw.randrange(300) for _ in range(5)))
                told.append(settlement_of(charge, usage, is_refund=draw.random() < 0.2))
                oracle.settle(told[-1])
                await bench.store.settle(told[-1])
            elif action < 0.95 and told:
                await bench.store.settle(draw.choice(told))
            elif granted:
                charge = draw.choice(granted)
                oracle.open[charge.charge_id] = (charge, oracle.at_ms + round(LEASE_S * 1000))
                await bench.store.renew([Renewal(charge, is_granted=True)])
            assert await bench.store.spending(key.key_id) == Spending(oracle.spent, oracle.held, len(oracle.open))
        entries = await bench.store.entries(LedgerQuery())
        assert sum(entry.cost_nanos for entry in entries) == oracle.spent
        assert sum(total.cost_nanos for total in await bench.store.totals()) == oracle.spent

    tell(story)


async def refusal_of(store: AccountStore, charge: Charge) -> str | None:
    try:
        rate_limits = await store.reserve(charge)
    except BudgetExhaustedError:
        return "budget"
    except LimitExceededError as error:
        return error.limit
    for window in (rate_limits.requests, rate_limits.input_tokens, rate_limits.output_tokens):
        assert window is None or 0 <= window.remaining <= window.limit
    return None


def test_many_at_once_never_take_more_than_there_is(tell: Tell) -> None:
    """Requests that end, abort, are refunded, are lost with their gateway, and are told twice, all at the same time."""

    async def story(bench: Bench) -> None:
        one = PRICES.cost_nanos(Usage(num_input=10, num_output=20))
        key = key_with(concurrency=6, budget_nanos=60 * one, requests_per_minute=1000)
        draw, num_running, most_running, settled = random.Random(5), 0, 0, 0

        async def client() -> None:
            nonlocal num_running, most_running, settled
            for _ in range(12):
                charge = bench.charge(key)
                if await refusal_of(bench.store, charge) is not None:
                    continue
                num_running += 1
                most_running = max(most_running, num_running)
                await asyncio.sleep(0)
                num_running -= 1
                usage = Usage(num_input=10, num_output=draw.randrange(21))
                settlement = settlement_of(charge, usage if draw.random() < 0.8 else Usage())
                settled += settlement.entry.cost_nanos
                await asyncio.gather(bench.store.settle(settlement), bench.store.settle(settlement))

        await asyncio.gather(*(client() for _ in range(20)))
        spending = await bench.store.spending(key.key_id)
        assert spending == Spending(settled, 0, 0)
        assert 0 < spending.spent_nanos <= 60 * one
        assert most_running <= 6
        assert sum(entry.cost_nanos for entry in await bench.store.entries(LedgerQuery())) == settled

    tell(story)


def test_several_gateways_share_one_redis(redis: RedisServer, tmp_path: Path) -> None:
    async def run() -> None:
        async with bench_of("redis", tmp_path, redis) as bench:
            other = RedisAccounts(redis.url, bench.clock, uses_local_time=True, prefix=bench.prefix)
            key = key_with(concurrency=3)
            await asyncio.gather(*(store.reserve(bench.charge(key)) for store in (bench.store, other, bench.store)))
            with pytest.raises(LimitExceededError):
                await other.reserve(bench.charge(key))
            await other.close()

    asyncio.run(run())


def test_redis_own_time_moves_buckets(redis: RedisServer) -> None:
    async def run() -> None:
        store = RedisAccounts(redis.url, ManualClock(), prefix="{own}", timeout_s=5.0)
        key = key_with(requests_per_minute=60_000)
        charges = [Charge(f"own-{index}", key, (50_000, 0, 0), 0) for index in range(2)]
        await store.reserve(charges[0])
        with pytest.raises(LimitExceededError) as refused:
            await store.reserve(charges[1])
        assert 35 < (refused.value.retry_after_s or 0) <= 40
        await store.close()

    asyncio.run(run())


def test_a_redis_that_is_silent_or_gone_is_said_to_be_away(tmp_path: Path) -> None:
    async def run(server: RedisServer) -> None:
        clock = ManualClock()
        store = RedisAccounts(server.url, clock, timeout_s=0.2)
        key = key_with()
        await store.add_key(key)
        with server.paused(), pytest.raises(AccountsUnavailableError, match="does not answer"):
            await store.find_keys([key.key_id])
        with pytest.raises(AccountsUnavailableError, match="in a moment"):
            await store.find_keys([key.key_id])
        clock.advance(1.0)
        assert await store.find_keys([key.key_id]) == {key.key_id: key}
        with contextlib.closing(server.client()) as client:
            client.save()
        server.kill()
        with pytest.raises(AccountsUnavailableError, match="does not answer"):
            await store.find_keys([key.key_id])
        server.start()
        clock.advance(1.0)
        assert await store.find_keys([key.key_id]) == {key.key_id: key}
        await store.close()

    with running_redis() as server:
        asyncio.run(run(server))


def test_one_slow_connection_does_not_refuse_other_requests(redis: RedisServer) -> None:
    """It made all others fail for half a second, although Redis answered them. Simulated seed 5596."""

    async def run() -> None:
        async with relay_to(redis.port) as (relay, url):
            store = RedisAccounts(url, ManualClock(), prefix="{slow}", timeout_s=0.5)
            key = key_with()
            await store.add_key(key)
            relay.withheld.add(0)
            slow = asyncio.create_task(store.find_keys([key.key_id]))
            await relay.asked.wait()
            assert await store.find_keys([key.key_id]) == {key.key_id: key}
            with pytest.raises(AccountsUnavailableError, match="does not answer"):
                await slow
            assert await store.find_keys([key.key_id]) == {key.key_id: key}
            await store.close()

    asyncio.run(run())


def test_what_is_damaged_in_redis_concerns_no_other_account(
    redis: RedisServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One record that nobody can read ended every look-up of keys, and a state of another type refused all requests."""

    async def run() -> None:
        async with bench_of("redis", tmp_path, redis) as bench:
            keys = sorted((key_with() for _ in range(3)), key=lambda key: key.key_id)
            for key in keys:
                await bench.store.add_key(key)
            charges = [(await bench.reserve(key))[0] for key in keys]
            damaged = keys[1].key_id
            with redis.client() as client:
                for value in (b"\xff", b"[]", b"null", b"{}", b'{"digest": 1, "limits": []}'):
                    client.hset(f"{bench.prefix}:keys", damaged, value)
                    found = await bench.store.find_keys([key.key_id for key in keys])
                    assert found == {key.key_id: key for key in keys if key.key_id != damaged}
                    assert await bench.store.all_keys() == sorted(found.values(), key=lambda key: key.key_id)
                client.set(f"{bench.prefix}:state:{damaged}", "x")
                client.set(f"{bench.prefix}:held:{damaged}", "x")
            for _ in range(2):
                with pytest.raises(AccountsUnavailableError, match="WRONGTYPE"):
                    await bench.store.spending(damaged)
                assert (await bench.store.spending(keys[0].key_id)).num_open == 1
            bench.clock.advance(LEASE_S - 1)
            await bench.store.renew([Renewal(charges[0], True)])
            bench.clock.advance(2.0)
            with pytest.raises(AccountsUnavailableError, match="WRONGTYPE"):
                await bench.store.renew([Renewal(charge, True) for charge in (charges[1], charges[0])])
            with pytest.raises(AccountsUnavailableError, match="WRONGTYPE"):
                await bench.store.expire()
            with redis.client() as client:
                assert client.zscore(f"{bench.prefix}:leases", keys[2].key_id) is None
            bench.clock.advance(LEASE_S - 1)
            assert [(await bench.store.spending(key.key_id)).num_open for key in (keys[0], keys[2])] == [1, 0]

    asyncio.run(run())
    (said,) = caplog.messages
    assert ":keys is damaged" in said


@pytest.mark.parametrize("entry", [b"\xff", b"", b"null", b"{}", b'{"usage": 5}'])
def test_damaged_usage_is_named(redis: RedisServer, tmp_path: Path, entry: bytes) -> None:
    async def run() -> None:
        async with bench_of("redis", tmp_path, redis) as bench:
            key = key_with()
            charge, _ = await bench.reserve(key)
            await bench.settle(charge, Usage(num_input=1))
            with redis.client() as client:
                number = client.xadd(f"{bench.prefix}:ledger", {"entry": entry}).decode()
                client.hset(f"{bench.prefix}:totals:1970-01-01", entry, 1)
                client.zadd(f"{bench.prefix}:days", {entry: 0})
            with pytest.raises(AccountsUnavailableError, match=f":ledger {number} in Redis is damaged"):
                await bench.store.entries(LedgerQuery())
            with pytest.raises(AccountsUnavailableError, match=":totals:1970-01-01 in Redis is damaged"):
                await bench.store.totals()

    asyncio.run(run())


def test_a_reservation_that_comes_after_its_refund_is_refused(redis: RedisServer, tmp_path: Path) -> None:
    """One that was given up while it was on its way: it must not be set aside for ever."""

    async def run() -> None:
        async with bench_of("redis", tmp_path, redis) as bench:
            key = key_with(concurrency=1)
            late = bench.charge(key)
            await bench.store.settle(settlement_of(late, Usage(), is_granted=False, is_refund=True))
            with pytest.raises(AccountsUnavailableError):
                await bench.store.reserve(late)
            assert await bench.store.spending(key.key_id) == Spending(0, 0, 0)

    asyncio.run(run())
