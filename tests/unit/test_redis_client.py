"""A client of a real Redis is asked by any number at once, cancelled whenever its caller wants, and never mixes up."""

import asyncio
import time
from collections.abc import Awaitable, Iterator
from typing import cast

import pytest

from tandem.accounts.charge import Charge
from tandem.accounts.key import new_key
from tandem.accounts.redis_store import RedisAccounts
from tandem.accounts.usage import Usage
from tandem.core.clock import ManualClock
from tandem.core.errors import ConfigurationError
from tandem.gateway.openai.responses.ids import new_response_id
from tandem.gateway.openai.responses.redis_store import RedisResponseStore
from tandem.gateway.openai.responses.sealing import ResponseSealer
from tandem.gateway.openai.responses.store import StoredResponse
from tandem.gateway.pin_book_redis import RedisPinBook
from tandem.redis_client import MAX_CONNECTIONS, answered_within, connect
from tests.helpers.redis_server import RedisServer, running_redis
from tests.helpers.secret import SECRET

LIMIT_S = 10.0
MANY = 300


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


@pytest.mark.parametrize("num_ticks", [*range(1, 30), 100])
def test_one_cancellation_ends_a_task_that_asks_again_and_again(redis: RedisServer, num_ticks: int) -> None:
    async def run() -> None:
        client = connect(redis.url)
        await client.ping()

        async def ask() -> None:
            while True:
                async with asyncio.timeout(LIMIT_S):
                    await client.get("k")

        for _ in range(10):
            task = asyncio.create_task(ask())
            for _ in range(num_ticks):
                await asyncio.sleep(0)
            task.cancel()
            async with asyncio.timeout(LIMIT_S):
                await asyncio.gather(task, return_exceptions=True)
            assert task.cancelled()
        await client.aclose()

    asyncio.run(run())


def test_a_question_that_was_given_up_is_nobody_else_s_answer(redis: RedisServer) -> None:
    async def run() -> None:
        client = connect(redis.url)
        await client.set("mine", "1")
        await client.set("another", "2")
        with redis.paused():
            for _ in range(3):
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.05):
                        await client.get("mine")
        async with asyncio.timeout(LIMIT_S):
            assert await client.get("another") == b"2"
        await client.aclose()

    asyncio.run(run())


def test_more_questions_than_connections_are_all_answered(redis: RedisServer) -> None:
    async def run() -> None:
        client = connect(f"{redis.url}?client_name=mine")
        async with asyncio.timeout(LIMIT_S):
            answers = await asyncio.gather(*(client.echo(str(number)) for number in range(MANY)))
        assert answers == [str(number).encode() for number in range(MANY)]
        with redis.client() as other:
            assert sum(each["name"] == "mine" for each in other.client_list()) == MAX_CONNECTIONS
        await client.aclose()

    asyncio.run(run())


def test_stores_take_any_number_of_questions_at_once_for_no_outage(redis: RedisServer) -> None:
    async def run() -> None:
        accounts = RedisAccounts(redis.url, ManualClock(), timeout_s=LIMIT_S)
        responses = RedisResponseStore(redis.url, ResponseSealer([SECRET]), timeout_s=LIMIT_S)
        pins = RedisPinBook(redis.url, LIMIT_S)
        key = new_key("test", 1)[0]
        await asyncio.gather(*(accounts.reserve(Charge.of(f"c{n}", key, Usage(1), 1)) for n in range(MANY)))
        assert (await accounts.spending(key.key_id)).num_open == MANY
        done = {"status": "completed", "output": []}
        entries = [StoredResponse({"id": new_response_id(), **done}, []) for _ in range(MANY)]
        assert all(await asyncio.gather(*(responses.put("a", each) for each in entries)))
        assert await asyncio.gather(*(responses.find("a", each.response_id) for each in entries)) == entries
        assert await asyncio.gather(*(pins.find([b"k"]) for _ in range(MANY))) == [[None]] * MANY
        for store in (accounts, responses, pins):
            await store.close()

    asyncio.run(run())


def test_a_loop_that_is_too_busy_to_hear_it_is_no_silence_of_redis(redis: RedisServer) -> None:
    async def run() -> None:
        client = connect(redis.url)

        async def busy() -> None:
            while True:
                time.sleep(0.03)
                await asyncio.sleep(0)

        working = asyncio.create_task(busy())
        for _ in range(3):
            async with answered_within(0.02):
                assert await client.ping()
        working.cancel()
        await client.aclose()

    asyncio.run(run())


def test_silence_is_bounded(redis: RedisServer) -> None:
    async def run() -> None:
        client = connect(redis.url)
        await client.ping()
        with redis.paused(), pytest.raises(TimeoutError):
            async with asyncio.timeout(LIMIT_S), answered_within(0.05):
                await client.ping()
        with pytest.raises(asyncio.CancelledError):  # which is no timeout
            async with answered_within(LIMIT_S):
                raise asyncio.CancelledError
        await client.aclose()

    asyncio.run(run())


def test_a_block_that_has_ended_leaves_no_timer() -> None:
    async def run() -> None:
        complaints: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        async with answered_within(0.01):
            ...
        await asyncio.sleep(0.02)
        assert complaints == []

    asyncio.run(run())


def test_after_many_that_were_given_up_it_asks_as_many_at_once_as_before(redis: RedisServer) -> None:
    async def run() -> None:
        client = connect(redis.url)

        async def ask(limit_s: float) -> bool:
            async with asyncio.timeout(limit_s):
                return await client.ping()

        for _ in range(3):
            with redis.paused():
                given_up = await asyncio.gather(*(ask(0.05) for _ in range(MANY)), return_exceptions=True)
            assert all(isinstance(each, TimeoutError) for each in given_up)
            assert all(await asyncio.gather(*(ask(LIMIT_S) for _ in range(MANY))))
        await client.aclose()

    asyncio.run(run())


def test_those_that_wait_are_served_in_their_order(redis: RedisServer) -> None:
    async def run() -> None:
        client = connect(f"{redis.url}?max_connections=1")
        async with asyncio.timeout(LIMIT_S):
            await asyncio.gather(*(client.rpush("order", n) for n in range(20)))
            assert await cast(Awaitable[list[bytes]], client.lrange("order", 0, -1)) == [b"%d" % n for n in range(20)]
        await client.aclose()

    asyncio.run(run())


def test_one_that_leaves_when_its_turn_comes_leaves_it_to_the_next(redis: RedisServer) -> None:
    async def run() -> None:
        client = connect(f"{redis.url}?max_connections=1")
        leaving: list[asyncio.Task[bool]] = []

        async def ask() -> bool:
            return await client.ping()

        async def ask_first() -> bool:
            answer = await client.ping()
            leaving[0].cancel()
            return answer

        asked = asyncio.create_task(ask_first())
        leaving.append(asyncio.create_task(ask()))
        waiting = asyncio.create_task(ask())
        async with asyncio.timeout(LIMIT_S):
            assert await asked
            assert await waiting
        assert leaving[0].cancelled()
        await client.aclose()

    asyncio.run(run())


def test_dropping_idle_connections_takes_none_from_those_that_wait(redis: RedisServer) -> None:
    async def run() -> None:
        client = connect(f"{redis.url}?max_connections=1")

        async def ask_and_drop() -> None:
            await client.ping()
            await client.connection_pool.disconnect(inuse_connections=False)

        async with asyncio.timeout(LIMIT_S):
            for _ in range(3):
                await asyncio.gather(ask_and_drop(), client.ping(), client.ping())
            before = await client.client_id()
            await client.connection_pool.disconnect(inuse_connections=False)
            assert await client.client_id() != before
        await client.aclose()

    asyncio.run(run())


def test_a_url_that_is_not_understood_is_told_without_its_password() -> None:
    with pytest.raises(ConfigurationError, match=r"'http://host:1'.*redis://host:port") as error:
        connect("http://me:secret@host:1")
    assert "secret" not in str(error.value)
