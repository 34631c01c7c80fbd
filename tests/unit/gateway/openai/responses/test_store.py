"""Contract of every store of responses, and what each adds."""

import asyncio
import tracemalloc
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tandem.core.clock import ManualClock
from tandem.core.errors import CapacityError, ConfigurationError, UnavailableError
from tandem.gateway.errors import RequestError
from tandem.gateway.openai.responses.ids import new_response_id
from tandem.gateway.openai.responses.redis_store import MAX_DROPPED, RedisResponseStore
from tandem.gateway.openai.responses.sealing import ResponseSealer
from tandem.gateway.openai.responses.store import (
    ENTRY_COST_BYTES,
    EmbeddedResponseStore,
    ResponseStore,
    StoredResponse,
)
from tests.helpers.redis_relay import relay_to
from tests.helpers.redis_server import RedisServer, running_redis
from tests.helpers.secret import SECRET

SEALER = ResponseSealer([SECRET])
MAX_ENTRY_BYTES = 4096
LEASE_S = 1.0


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


@pytest.fixture(params=["embedded", "redis"])
def opened(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Opens a store, with these limits, for the time of a block."""
    server = request.getfixturevalue("redis") if request.param == "redis" else None

    @asynccontextmanager
    async def open_store(**more: int) -> AsyncIterator[ResponseStore]:
        limits: dict[str, Any] = {"max_entry_bytes": MAX_ENTRY_BYTES, "lease_s": LEASE_S, **more}
        if server is None:
            store: ResponseStore = EmbeddedResponseStore(**limits)
        else:
            store = RedisResponseStore(server.url, SEALER, prefix=f"test-{uuid.uuid4()}", timeout_s=10.0, **limits)
        try:
            yield store
        finally:
            await store.close()

    return open_store


def entry(status: str = "completed", response_id: str | None = None, text: str = "hello") -> StoredResponse:
    output = [{"id": "msg_1", "type": "message", "status": "completed", "content": [{"text": text}]}]
    return StoredResponse({"id": response_id or new_response_id(), "status": status, "output": output}, [{"id": "i"}])


def size_of(kept: StoredResponse) -> int:
    return len(kept.encoded(MAX_ENTRY_BYTES)) + ENTRY_COST_BYTES


async def left_of(store: ResponseStore, tenant: str, entries: Sequence[StoredResponse]) -> list[int]:
    """Indices of the entries that are still stored."""
    return [index for index, each in enumerate(entries) if await store.find(tenant, each.response_id) is not None]


def run(opened: Callable[..., Any], story: Callable[[ResponseStore], Awaitable[None]], **limits: int) -> None:
    async def play() -> None:
        async with opened(**limits) as store:
            await story(store)

    asyncio.run(play())


def test_what_was_put_is_found_as_it_was_until_it_is_deleted(opened: Callable[[], Any]) -> None:
    async def story(store: ResponseStore) -> None:
        first, second = entry(text="é\u0000✓"), entry()
        assert await store.find("a", first.response_id) is None
        assert await store.put("a", first)
        assert await store.put("a", second)
        assert await store.find("a", first.response_id) == first
        newer = entry(response_id=first.response_id, text="newer")
        assert await store.put("a", newer)
        assert await store.find("a", first.response_id) == newer
        assert await store.delete("a", first.response_id)
        assert not await store.delete("a", first.response_id)
        assert await store.find("a", first.response_id) is None
        assert await store.find("a", second.response_id) == second

    run(opened, story)


@pytest.mark.parametrize("other", ["", "b", "a:", "a{x}", "\ud800"])
def test_another_tenant_finds_and_changes_nothing(opened: Callable[[], Any], other: str) -> None:
    async def story(store: ResponseStore) -> None:
        mine = entry("in_progress")
        await store.put("a", mine)
        assert await store.find(other, mine.response_id) is None
        assert not await store.renew(other, mine.response_id)
        assert not await store.delete(other, mine.response_id)
        assert not await store.put(other, entry("cancelled", mine.response_id), over_running=True)
        assert await store.find("a", mine.response_id) == mine

    run(opened, story)


def test_one_of_those_that_end_a_running_response_wins(opened: Callable[[], Any]) -> None:
    async def story(store: ResponseStore) -> None:
        running = entry("in_progress")
        assert not await store.put("a", entry("completed", running.response_id), over_running=True)
        await store.put("a", running)
        ends = [entry(status, running.response_id) for status in ("completed", "cancelled", "failed")]
        won = await asyncio.gather(*(store.put("a", end, over_running=True) for end in ends))
        assert sum(won) == 1
        assert await store.find("a", running.response_id) == ends[won.index(True)]
        assert not await store.renew("a", running.response_id)

    run(opened, story)


def test_one_that_is_not_renewed_is_lost(opened: Callable[[], Any]) -> None:
    async def story(store: ResponseStore) -> None:
        running, done = entry("in_progress"), entry()
        await store.put("a", running)
        await store.put("a", done)
        async with asyncio.timeout(5):
            while not (found := await store.find("a", running.response_id)).is_lost:  # type: ignore[union-attr]
                await asyncio.sleep(LEASE_S / 20)
        assert found == StoredResponse(running.response, running.items, is_lost=True)
        kept = await store.find("a", done.response_id)
        assert kept is not None
        assert not kept.is_lost
        assert await store.renew("a", running.response_id)
        assert await store.find("a", running.response_id) == running

    run(opened, story)


def test_an_entry_that_is_too_large_is_refused_and_changes_nothing(opened: Callable[[], Any]) -> None:
    async def story(store: ResponseStore) -> None:
        before = entry()
        await store.put("a", before)
        with pytest.raises(CapacityError, match=f"at most {MAX_ENTRY_BYTES}"):
            await store.put("a", entry(response_id=before.response_id, text="x" * MAX_ENTRY_BYTES))
        assert await store.find("a", before.response_id) == before

    run(opened, story)


def test_past_the_bound_the_oldest_go_first(opened: Callable[..., Any]) -> None:
    entries = [entry(text="x" * 100) for _ in range(6)]

    async def story(store: ResponseStore) -> None:
        for _ in range(2):
            for each in entries:
                await store.put("a", each)
            assert await left_of(store, "a", entries) == [3, 4, 5]
            await store.put("a", entries[3])
            await store.put("a", entries[0])
            assert await left_of(store, "a", entries) == [0, 3, 5]
            await store.delete("a", entries[5].response_id)
            await store.put("a", entries[1])
            assert await left_of(store, "a", entries) == [0, 1, 3]
            for each in entries:
                await store.delete("a", each.response_id)

    run(opened, story, max_bytes=3 * size_of(entries[0]) + 10)


def test_a_tenant_that_floods_the_store_pushes_out_its_own(opened: Callable[..., Any]) -> None:
    size = size_of(entry())
    mine, theirs = [entry() for _ in range(60)], [entry() for _ in range(20)]

    async def story(store: ResponseStore) -> None:
        for each in theirs[:5]:
            await store.put("b", each)
        for each in mine:
            await store.put("a", each)
        assert await left_of(store, "b", theirs) == list(range(5))
        assert await left_of(store, "a", mine) == list(range(45, 60))
        for each in theirs[5:]:
            await store.put("b", each)
        held = [len(await left_of(store, tenant, entries)) for tenant, entries in (("a", mine), ("b", theirs))]
        assert sum(held) == 20
        assert min(held) >= 9
        assert await left_of(store, "b", theirs) == list(range(20 - held[1], 20))
        small = entry(text="")
        await store.put("c", small)
        for each in mine:
            await store.put("a", each)
        assert await store.find("c", small.response_id) == small

    run(opened, story, max_bytes=20 * size)


def test_what_was_just_put_is_there_however_many_tenants_there_are(opened: Callable[..., Any]) -> None:
    large = [entry(text="x" * 3000) for _ in range(6)]
    small = entry(text="")

    async def story(store: ResponseStore) -> None:
        await store.put("small", small)
        for number, each in enumerate(large):
            await store.put(f"tenant {number}", each)
            assert await store.find(f"tenant {number}", each.response_id) == each
        left = [await store.find(f"tenant {number}", each.response_id) for number, each in enumerate(large)]
        assert sum(each is not None for each in left) == 2
        assert await store.find("small", small.response_id) == small

    run(opened, story, max_bytes=2 * size_of(large[0]) + size_of(small))


def test_entries_in_redis_that_have_expired_take_no_room(redis: RedisServer) -> None:
    async def story() -> None:
        short, kept = entry(), entry()
        stores = [
            RedisResponseStore(redis.url, SEALER, prefix="room", timeout_s=10.0, ttl_s=ttl_s) for ttl_s in (0.05, 100.0)
        ]
        await stores[0].put("a", short)
        async with asyncio.timeout(5):
            while await stores[0].find("a", short.response_id) is not None:
                await asyncio.sleep(0.01)
        await stores[1].put("b", kept)
        with redis.client() as client:
            assert int(client.hget("{room}:sizes", "total")) == size_of(kept)
            assert client.hlen("{room}:sizes") == 2
            await stores[1].delete("b", kept.response_id)
            assert client.hgetall("{room}:sizes") == {b"total": b"0"}
            assert client.keys("{room}:*") == [b"{room}:sizes"]
        for store in stores:
            await store.close()

    asyncio.run(story())


def test_a_bound_that_was_lowered_is_kept_after_some_calls_none_of_which_drops_very_many(redis: RedisServer) -> None:
    async def story() -> None:
        size = size_of(entry())
        wide, narrow = [
            RedisResponseStore(redis.url, SEALER, prefix="lowered", timeout_s=10.0, max_bytes=num * size)
            for num in (10 * MAX_DROPPED, 10)
        ]
        num_before = 2 * MAX_DROPPED + 100
        await asyncio.gather(*(wide.put("a", entry()) for _ in range(num_before)))
        left = []
        with redis.client() as client:
            for _ in range(4):
                await narrow.put("b", entry())
                left.append(client.zcard("{lowered}:expiries"))
            assert left == [num_before + 1 - MAX_DROPPED, num_before + 2 - 2 * MAX_DROPPED, 10, 10]
        for store in (wide, narrow):
            await store.close()

    asyncio.run(story())


def test_a_large_entry_pushes_out_as_much_as_it_brings(redis: RedisServer) -> None:
    async def story() -> None:
        size, num_before = size_of(entry()), 2 * MAX_DROPPED
        store = RedisResponseStore(redis.url, SEALER, prefix="large", timeout_s=10.0, max_bytes=num_before * size)
        await asyncio.gather(*(store.put("a", entry()) for _ in range(num_before)))
        await store.put("b", entry(text="x" * (3 * MAX_DROPPED // 2 * size)))
        with redis.client() as client:
            assert int(client.hget("{large}:sizes", "total")) <= num_before * size
        await store.close()

    asyncio.run(story())


def test_a_redis_that_is_full_of_other_things_takes_no_response(redis: RedisServer) -> None:
    async def story() -> None:
        store = RedisResponseStore(redis.url, SEALER, prefix="full", timeout_s=10.0)
        with redis.client() as client:
            client.config_set("maxmemory", 1)
            try:
                with pytest.raises(UnavailableError):
                    await store.put("a", entry())
            finally:
                client.config_set("maxmemory", 0)
            assert client.keys("*full*") == []
        await store.close()

    asyncio.run(story())


def test_a_redis_that_is_lost_is_said_to_be_away_and_comes_back_empty(caplog: pytest.LogCaptureFixture) -> None:
    async def story(server: RedisServer) -> None:
        clock = ManualClock()
        store = RedisResponseStore(server.url, SEALER, timeout_s=1.0, clock=clock)
        kept = entry()
        await store.put("a", kept)
        server.kill()
        for _ in range(2):
            with pytest.raises(UnavailableError, match=r"^stored responses are temporarily not available; try again$"):
                await store.find("a", kept.response_id)
        server.start()
        with pytest.raises(UnavailableError):
            await store.find("a", kept.response_id)
        clock.advance(1.5)
        assert await store.find("a", kept.response_id) is None
        said = [record.getMessage() for record in caplog.records if record.name.endswith("redis_store")]
        assert len(said) == 1
        assert said[0].startswith("the store of responses does not answer: ")
        with server.paused():
            slow = RedisResponseStore(server.url, SEALER, timeout_s=0.05)
            with pytest.raises(UnavailableError):
                await slow.put("a", kept)
            await slow.close()
        await store.close()

    with running_redis() as server:
        asyncio.run(story(server))


def test_one_slow_connection_does_not_refuse_other_requests(redis: RedisServer) -> None:
    async def story() -> None:
        async with relay_to(redis.port) as (relay, url):
            store = RedisResponseStore(url, SEALER, prefix="slow", timeout_s=0.5, clock=ManualClock())
            kept = entry()
            await store.put("a", kept)
            relay.withheld.add(0)
            slow = asyncio.create_task(store.find("a", kept.response_id))
            await relay.asked.wait()
            assert await store.find("a", kept.response_id) is not None
            with pytest.raises(UnavailableError):
                await slow
            assert await store.find("a", kept.response_id) is not None
            await store.close()

    asyncio.run(story())


def test_entries_in_redis_expire_and_nonsense_is_refused(redis: RedisServer) -> None:
    async def story() -> None:
        store = RedisResponseStore(redis.url, SEALER, prefix="expiring", ttl_s=100.0)
        done, running = entry(), entry("in_progress")
        await store.put("a", done)
        await store.put("a", running)
        with redis.client() as client:
            keys = client.keys("expiring:{*")
            assert len(keys) == 3
            assert all(0 < client.ttl(key) <= 100 for key in keys)
            (key,) = [key for key in keys if done.response_id.encode() in key]
            place = store._place("a", done.response_id)
            for nonsense in (b"{", b"[]", b"{}", b'{"response": {}}'):
                client.hset(key, "body", SEALER.seal(nonsense, place))
                with pytest.raises(RequestError, match="can no longer be read"):
                    await store.find("a", done.response_id)
        await store.close()

    asyncio.run(story())


def test_a_url_that_is_none_is_refused_without_its_password() -> None:
    with pytest.raises(ConfigurationError) as refused:
        RedisResponseStore("http://me:secret@host", SEALER)
    assert "secret" not in str(refused.value)


def test_redis_holds_no_text_and_nothing_that_was_put_there_by_others_is_read(redis: RedisServer) -> None:
    async def story() -> None:
        store = RedisResponseStore(redis.url, SEALER, prefix="sealed", timeout_s=10.0)
        mine, other = entry(text="a secret of mine"), entry(text="of somebody else")
        await store.put("a", mine)
        await store.put("b", other)
        with redis.client() as client:
            bodies = {key: client.hget(key, "body") for key in client.keys("sealed:{*}")}
            assert len(bodies) == 2
            assert not [body for body in bodies.values() if b"secret" in body or b"somebody" in body]
            (key,) = [key for key in bodies if mine.response_id.encode() in key]
            (foreign,) = [body for name, body in bodies.items() if name != key]
            altered = bytes([*bodies[key][:-1], bodies[key][-1] ^ 1])
            for body in (mine.encoded(MAX_ENTRY_BYTES), foreign, altered, b"", bodies[key][:10]):
                client.hset(key, "body", body)
                with pytest.raises(RequestError, match="can no longer be read"):
                    await store.find("a", mine.response_id)
            client.hset(key, "body", bodies[key])
        assert await store.find("a", mine.response_id) == mine
        await store.close()

    asyncio.run(story())


def test_keys_are_changed_without_losing_what_the_old_one_encrypted(
    redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: what no key opens was a 503 that named the operator's setting, and could be tried for ever."""
    old, new = b"the old key of the gateways", b"the new key of the gateways"
    before, between, after = entry(), entry(), entry()

    async def story() -> None:
        stores = [
            RedisResponseStore(redis.url, ResponseSealer(keys), prefix="rotated", timeout_s=10.0)
            for keys in ([old], [new, old], [new])
        ]
        await stores[0].put("a", before)
        await stores[1].put("a", between)
        assert await stores[1].find("a", before.response_id) == before
        await stores[2].put("a", after)
        assert await stores[1].find("a", after.response_id) == after
        assert await stores[2].find("a", between.response_id) == between
        for store, unknown in ((stores[2], before), (stores[0], between)):
            with pytest.raises(RequestError, match="can no longer be read; send its request again") as lost:
                await store.find("a", unknown.response_id)
            assert (lost.value.status, "key" in str(lost.value)) == (404, False)
            assert "All gateways need the same responses_key" in caplog.records[-1].getMessage()
        for store in stores:
            await store.close()

    asyncio.run(story())


@pytest.mark.parametrize(("keys", "said"), [([], "empty"), ([b"long enough to be one", b"short"], "key 2 .* 5 bytes")])
def test_keys_that_are_none_are_refused(keys: list[bytes], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        ResponseSealer(keys)


def test_an_entry_takes_no_more_memory_than_its_text() -> None:
    """Regression: each kept the buffer of 16 KiB and more in which it was encoded, several times what was counted."""
    entry = StoredResponse({"id": new_response_id(), "status": "completed", "output": ["x" * 2000]}, [])
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        texts = [entry.encoded(2**20) for _ in range(100)]
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (after - before) / len(texts) < len(texts[0]) + 512
