"""Updates arrive in order and all at once, errors after them, and writers wait for a slow reader."""

import asyncio

import pytest

from tandem.core.errors import TandemError
from tandem.core.output import RequestOutput
from tandem.core.pins import Pin
from tandem.core.types import FinishReason, TokenLogprobs
from tandem.gateway.update_queue import MAX_UPDATES, UpdateQueue
from tests.helpers.outputs import output_of

PINS = (Pin(16, 60.0),)


def scored(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(token_id, -0.5, 1, ())


def output(number: int) -> RequestOutput:
    return output_of(0, (number,), "")


def test_all_there_is_comes_at_once_and_the_first_error_after_it() -> None:
    async def run() -> None:
        queue = UpdateQueue()
        await queue.put(output(1))
        await queue.put(output(2))
        queue.fail(TandemError("first"))
        queue.fail(TandemError("second"))
        assert [item.token_ids for item in await queue.get()] == [(1, 2)]
        for _ in range(2):
            with pytest.raises(TandemError, match="first"):
                await queue.get()

    asyncio.run(run())


def test_news_of_one_choice_in_a_row_is_put_together_and_keeps_everything() -> None:
    first = output_of(0, (1,), "a", (scored(1),), (None, scored(9)), num_cached_tokens=3, pins=())
    last = output_of(
        0, (2, 3), "bc", (scored(2), scored(3)), None, FinishReason.STOP, "x", num_cached_tokens=0, pins=PINS
    )
    other = output_of(1, (4,), "d")

    async def run(*given: RequestOutput) -> list[RequestOutput]:
        queue = UpdateQueue()
        for item in given:
            await queue.put(item)
        return await queue.get()

    whole = output_of(
        0,
        (1, 2, 3),
        "abc",
        (scored(1), scored(2), scored(3)),
        (None, scored(9)),
        FinishReason.STOP,
        "x",
        num_cached_tokens=3,
        pins=PINS,
    )
    assert asyncio.run(run(first, last)) == [whole]
    assert asyncio.run(run(first, other, last)) == [first, other, last]
    assert asyncio.run(run(output_of(0, (1,), "a"), output_of(0, (), "b"))) == [output_of(0, (1,), "ab")]


def test_a_writer_waits_while_the_reader_is_far_behind() -> None:
    async def run() -> None:
        queue = UpdateQueue()
        for number in range(MAX_UPDATES):
            await queue.put(output(number))
        waiting = asyncio.create_task(queue.put(output(MAX_UPDATES)))
        done, _ = await asyncio.wait((waiting,), timeout=0.01)
        assert not done
        (taken,) = await queue.get()
        assert len(taken.token_ids) == MAX_UPDATES
        await asyncio.wait_for(waiting, 20)
        assert [item.token_ids for item in await queue.get()] == [(MAX_UPDATES,)]

    asyncio.run(run())
