"""News comes in order and all at once, errors after it, and writers wait for a slow reader."""

import asyncio

import pytest

from tandem.core.errors import TandemError
from tandem.gateway.news_queue import MAX_NEWS, NewsQueue
from tandem.gateway.request import ChoiceNews


def news(number: int) -> ChoiceNews:
    return ChoiceNews(0, (number,), "")


def test_all_there_is_comes_at_once_and_the_first_error_after_it() -> None:
    async def run() -> None:
        queue = NewsQueue()
        await queue.put(news(1))
        await queue.put(news(2))
        queue.fail(TandemError("first"))
        queue.fail(TandemError("second"))
        assert [item.token_ids for item in await queue.take()] == [(1,), (2,)]
        for _ in range(2):
            with pytest.raises(TandemError, match="first"):
                await queue.take()

    asyncio.run(run())


def test_a_writer_waits_while_the_reader_is_far_behind() -> None:
    async def run() -> None:
        queue = NewsQueue()
        for number in range(MAX_NEWS):
            await queue.put(news(number))
        waiting = asyncio.create_task(queue.put(news(MAX_NEWS)))
        done, _ = await asyncio.wait((waiting,), timeout=0.01)
        assert not done
        assert len(await queue.take()) == MAX_NEWS
        await asyncio.wait_for(waiting, 1)
        assert [item.token_ids for item in await queue.take()] == [(MAX_NEWS,)]

    asyncio.run(run())
