"""Every store in Redis works as the user of its role, with nothing refused, and as no other."""

import asyncio
import hashlib
import re
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import AuthenticationError, NoPermissionError

from tandem.accounts.charge import Charge, ChargeOutcome, ChargeSettlement, LedgerEntry, Renewal
from tandem.accounts.key import AccountKey, KeyLimits, new_key
from tandem.accounts.ledger_query import LedgerQuery
from tandem.accounts.redis_store import RedisAccounts
from tandem.accounts.usage import Usage
from tandem.core.clock import ManualClock, SystemClock
from tandem.core.errors import TandemError
from tandem.core.events import BlockRemoved, BlockStored
from tandem.gateway.openai.responses.ids import new_response_id
from tandem.gateway.openai.responses.redis_store import RedisResponseStore
from tandem.gateway.openai.responses.sealing import ResponseSealer
from tandem.gateway.openai.responses.store import ENTRY_COST_BYTES, StoredResponse
from tandem.gateway.pin_book_redis import RedisPinBook
from tandem.locality.redis import RedisIndex
from tandem.process.discovery_redis import RedisDiscovery
from tandem.rpc.messages import WorkerAddress, WorkerRecord
from tests.helpers.helm import CHART
from tests.helpers.redis_server import RedisServer
from tests.helpers.redis_users import ROLES, role_url, running_roles
from tests.helpers.secret import AS_WORKER, SECRET

RULES = (CHART / "files" / "redis-users.acl").read_text()
PATIENT_S = 10.0
# Of administrators, and of connections as they begin.
BY_THE_TEST = {"auth", "hello", "config|resetstat", "acl|log"}


@pytest.fixture(scope="module")
def roles() -> Iterator[tuple[RedisServer, Redis]]:
    with running_roles(RULES) as running:
        yield running


@pytest.fixture
def server(roles: tuple[RedisServer, Redis]) -> RedisServer:
    server, admin = roles
    admin.flushall()
    admin.script_flush()
    admin.acl_log_reset()
    admin.config_resetstat()
    return server


@pytest.fixture
def admin(roles: tuple[RedisServer, Redis]) -> Redis:
    return roles[1]


async def discover(url: str) -> None:
    """Announced, listed, withdrawn, and what is damaged replaced."""
    discovery = RedisDiscovery(url, AS_WORKER, timeout_s=PATIENT_S)
    record = WorkerRecord(WorkerAddress("w", "127.0.0.1:1", "i"), role="decode", model="m", pool="p")
    try:
        await discovery.announce(record)
        assert await discovery.workers() == [record]
        await discovery.withdraw(record)
        assert await discovery.workers() == []
        await discovery.announce(record)
    finally:
        await discovery.close()


def chain(name: str, length: int) -> list[bytes]:
    return [hashlib.sha256(f"{name} {index}".encode()).digest() for index in range(length)]


async def index_blocks(url: str) -> None:
    await asyncio.to_thread(_index_blocks, url)


def _index_blocks(url: str) -> None:
    """Snapshots, reports, questions and a bound that makes generations turn over."""
    index = RedisIndex(url, max_block_replicas=1024, read_timeout_s=PATIENT_S, write_timeout_s=PATIENT_S)
    try:
        first = chain("a", 8)
        index.replace("w", 1, first, 1)
        index.publish("w", 1, [BlockStored(each, None, 0) for each in chain("b", 8)], 2)
        index.publish("w", 1, [BlockRemoved(first[-1], 0)], 3)
        assert index.leading_blocks(first) == {"w": 7}
        for number in range(8):
            index.replace(f"w{number}", 1, chain(str(number), 100), 1)
            index.leading_blocks(chain(str(number), 100))
        assert index.stats().num_rotations > 0
        index.remove_worker("w")
    finally:
        index.close()


async def pin(url: str) -> None:
    book = RedisPinBook(url, timeout_s=PATIENT_S)
    try:
        await book.keep({b"a" * 16: 300.0})
        assert await book.find([b"a" * 16, b"b" * 16]) == [300.0, None]
    finally:
        await book.close()


def response(status: str) -> StoredResponse:
    return StoredResponse({"id": new_response_id(), "status": status, "output": []}, [])


async def keep_responses(url: str) -> None:
    """Put, renewed, found and deleted, and older ones dropped for room."""
    store = RedisResponseStore(
        url,
        ResponseSealer([SECRET]),
        max_bytes=4 * (ENTRY_COST_BYTES + 200),
        max_entry_bytes=ENTRY_COST_BYTES,
        timeout_s=PATIENT_S,
    )
    try:
        running = response("in_progress")
        assert await store.put("t", running)
        assert await store.renew("t", running.response_id)
        for _ in range(8):
            assert await store.put("t", response("completed"))
        last = response("completed")
        assert await store.put("t", last)
        found = await store.find("t", last.response_id)
        assert found is not None
        assert await store.find("t", running.response_id) is None
        assert await store.delete("t", last.response_id)
    finally:
        await store.close()


async def bill(url: str) -> None:
    """A key's life: made, reserved with, renewed, settled, read back and revoked."""
    store = RedisAccounts(url, SystemClock(), timeout_s=PATIENT_S)
    key, _ = new_key("k", 0, limits=KeyLimits(requests_per_minute=9, concurrency=2, budget_nanos=10**9))
    try:
        await store.add_key(key)
        assert await store.find_keys([key.key_id]) == {key.key_id: key}
        charge = Charge.of("c", key, Usage(num_input=1, num_output=1), 10)
        await store.reserve(charge)
        await store.renew([Renewal(charge, is_granted=True)])
        await store.settle(settled(charge))
        assert (await store.spending(key.key_id)).spent_nanos == 7
        assert await store.incarnation()
        await bill_late(url, key)
        assert len(await store.entries(LedgerQuery())) == 2
        assert len(await store.totals()) == 1
        assert await store.revoke_key(key.key_id, 1)
        assert [each.is_live for each in await store.all_keys()] == [False]
    finally:
        await store.close()


async def bill_late(url: str, key: AccountKey) -> None:
    """A request that is billed at its checkpoint once its lease is over, and whose gateway comes back after all."""
    clock = ManualClock(1000.0)
    store = RedisAccounts(url, clock, uses_local_time=True, timeout_s=PATIENT_S, lease_s=10.0)
    charge = Charge.of("late", key, Usage(num_input=1, num_output=1), 10)
    try:
        await store.reserve(charge)
        await store.renew([Renewal(charge, is_granted=True, checkpoint=settled(charge).entry)])
        clock.advance(11.0)
        await store.expire()
        assert (await store.spending(key.key_id)).spent_nanos == 14
        await store.settle(settled(charge))
        assert (await store.spending(key.key_id)).spent_nanos == 14
    finally:
        await store.close()


def settled(charge: Charge) -> ChargeSettlement:
    key, used = charge.key, Usage(num_input=1)
    own = (charge.charge_id, "request", key.key_id, key.tenant, "tiny", 0)
    entry = LedgerEntry(*own, used, 7, ChargeOutcome.DONE.value)
    return ChargeSettlement(entry, key.limits.rates, charge.amounts, True, (1, 1, 0))


@dataclass(frozen=True)
class Store:
    """Store in Redis: the role that owns it, a session that needs every right of the store, and one of its keys."""

    role: str
    session: Callable[[str], Coroutine[Any, Any, None]]
    key: str


STORES = {
    "discovery": Store("cluster", discover, "{tandem}:workers"),
    "index": Store("cluster", index_blocks, "{tandem}:locality:meta"),
    "pins": Store("gateway", pin, "tandem:pins:x"),
    "responses": Store("gateway", keep_responses, "{tandem:responses}:sizes"),
    "response": Store("gateway", keep_responses, "tandem:responses:{x}"),
    "accounts": Store("accounts", bill, "{tandem:accounts}:keys"),
}
WRONG = [(name, role) for name, store in STORES.items() for role in ROLES if role != store.role]


def allowed(role: str) -> set[str]:
    (line,) = [line for line in RULES.splitlines() if line.split()[1] == role]
    return {word[1:] for word in line.split() if word.startswith("+")}


def refused(admin: Redis) -> list[dict[str, Any]]:
    """Refusals in the ACL log, except failed authentications."""
    return [entry for entry in admin.acl_log() if entry["reason"] != "auth"]


@pytest.mark.parametrize("role", ROLES)
def test_a_role_needs_every_right_that_it_has_and_no_other(role: str, server: RedisServer, admin: Redis) -> None:
    own = [store for store in STORES.values() if store.role == role]
    admin.set("{tandem}:workers", "damaged")  # NOTE: which discovery replaces
    admin.config_resetstat()
    for session in dict.fromkeys(store.session for store in own):
        asyncio.run(session(role_url(server, role)))
    assert refused(admin) == []
    called = {name.removeprefix("cmdstat_") for name in admin.info("commandstats")}
    assert called - BY_THE_TEST == allowed(role) - {"ping"}


@contextmanager
def told_with(remedy: str, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """An error whose remedy is in its words, or in the log where the words are for clients."""
    with pytest.raises(TandemError) as raised:
        yield
    assert re.search(remedy, f"{raised.value}\n{caplog.text}")


@pytest.mark.parametrize(("name", "role"), WRONG)
def test_no_role_has_a_store_of_another(
    name: str, role: str, server: RedisServer, admin: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    store = STORES[name]
    with told_with(f"redis://{store.role}:PASSWORD@host:port, with the rules of .*users.acl", caplog):
        asyncio.run(store.session(role_url(server, role)))
    assert refused(admin)
    assert admin.dbsize() == 0
    with Redis.from_url(role_url(server, role)) as client, pytest.raises(NoPermissionError):
        client.hget(store.key, "field")


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(
    "command",
    [
        *("FLUSHALL", "KEYS *", "CONFIG GET *", "ACL LIST", "SCRIPT FLUSH", "SCAN 0", "CLIENT LIST", "MONITOR", "SAVE"),
        *("PUBLISH x y", "FUNCTION LIST", "SHUTDOWN NOSAVE", "SELECT 1", "COPY {tandem}:a {tandem}:b"),
    ],
)
def test_no_role_commands_the_server(role: str, command: str, server: RedisServer) -> None:
    with Redis.from_url(role_url(server, role)) as client, pytest.raises(NoPermissionError):
        client.execute_command(*command.split())


@pytest.mark.parametrize("name", STORES)
@pytest.mark.parametrize("user", ["", ":x@", "cluster:wrong@", "nobody:x@"])
def test_a_wrong_credential_is_told_with_the_remedy(
    name: str, user: str, server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    store = STORES[name]
    with told_with(f"give the URL the user .* redis://{store.role}:PASSWORD@host:port", caplog):
        asyncio.run(store.session(server.url.replace("//", f"//{user}")))


def test_nobody_is_let_in_without_a_name(server: RedisServer) -> None:
    with server.client() as client, pytest.raises(AuthenticationError):
        client.ping()
