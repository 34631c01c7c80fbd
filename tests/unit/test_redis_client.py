"""A client of a real Redis is cancelled whenever its caller wants, and is given up without mixing up answers."""

import asyncio
from collections.abc import Iterator

import pytest

from tandem.core.errors import ConfigurationError
from tandem.redis_client import connect
from tests.helpers.redis_server import RedisServer, running_redis

LIMIT_S = 10.0


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


@pytest.mark.parametrize("num_ticks", [*range(1, 30), 100])
def test_one_cancellation_ends_a_task_that_asks_again_and_again(redis: RedisServer, num_ticks: int) -> None:
    async def run() -> None:
        client = connect(redis.url, connect_timeout_s=LIMIT_S)
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
        client = connect(redis.url, connect_timeout_s=LIMIT_S)
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


def test_a_url_that_is_not_understood_is_told_without_its_password() -> None:
    with pytest.raises(ConfigurationError, match=r"'host:1'.*redis://host:port") as error:
        connect("http://me:secret@host:1", connect_timeout_s=1.0)
    assert "secret" not in str(error.value)
