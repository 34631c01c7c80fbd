"""Messages that wait to be written: order, what is plain, and room."""

import asyncio
from dataclasses import replace

import pytest

from tandem.core.output import RequestOutput
from tandem.core.timeline import Stage
from tandem.core.types import FinishReason
from tandem.rpc import methods
from tandem.rpc.messages import GenerateUpdate
from tandem.rpc.serve_messages import CallStatus, OtherUpdate, ServeUpdate, TextUpdate
from tandem.rpc.shared_outbox import SharedOutbox
from tests.unit.rpc.handlers import run
from tests.unit.rpc.test_plain_updates import NOT_PLAIN


def update(token_id: int, text: str = "a", reason: FinishReason | None = None) -> GenerateUpdate:
    return GenerateUpdate(RequestOutput("r", 0, (token_id,), text, finish_reason=reason))


def opened(*numbers: int, credit: int = 100) -> SharedOutbox:
    outbox = SharedOutbox()
    for number in numbers:
        outbox.open(number, credit)
    return outbox


def test_plain_updates_of_a_request_are_one_entry() -> None:
    async def check() -> None:
        outbox = opened(1, 2)
        for token_id in (5, 6):
            await outbox.put(1, update(token_id))
        await outbox.put(2, update(7, "é"))
        await outbox.wait()
        taken = outbox.drain()
        assert taken.plain == (TextUpdate(1, (5, 6), "aa"), TextUpdate(2, (7,), "é"))
        assert taken.others == ()
        assert outbox.drain().plain == ()

    run(check)


def test_other_updates_keep_their_place_among_plain_ones() -> None:
    async def check() -> None:
        outbox = opened(1)
        said = [update(1), replace(update(2), timeline=(Stage("s", "w", 0.0, 0.0),)), update(3), update(4)]
        said.append(update(5, reason=FinishReason.STOP))
        for item in said:
            await outbox.put(1, item)
        outbox.end(1, CallStatus())
        taken = outbox.drain()
        assert taken.plain == ()
        *told, end = taken.others
        assert [methods.GENERATE.answer.decode(one.update).output.token_ids for one in told] == [
            (1,),
            (2,),
            (3, 4),
            (5,),
        ]
        assert end == OtherUpdate(1, status=CallStatus())

    run(check)


@pytest.mark.parametrize("item", NOT_PLAIN, ids=repr)
def test_nothing_is_lost_of_what_is_not_plain(item: GenerateUpdate) -> None:
    async def check() -> None:
        outbox = opened(1)
        await outbox.put(1, item)
        (told,) = outbox.drain().others
        assert methods.GENERATE.answer.decode(told.update) == item

    run(check)


def test_without_room_a_request_waits_and_another_does_not() -> None:
    async def check() -> None:
        outbox = opened(1, 2, credit=2)
        for token_id in range(2):
            await outbox.put(1, update(token_id))
        waiting = asyncio.ensure_future(outbox.put(1, update(9)))
        await outbox.put(2, update(0))
        assert not waiting.done()
        assert [item.token_ids for item in outbox.drain().plain] == [(0, 1), (0,)]
        outbox.add_credit(1, 1)
        await waiting
        assert [item.token_ids for item in outbox.drain().plain] == [(9,)]

    run(check)


def test_room_for_a_request_that_has_ended_is_nothing() -> None:
    """Nothing is kept for it, as for one that never was: nothing can be put."""

    async def check() -> None:
        outbox = opened(1)
        outbox.forget(1)
        for number in (1, 77):
            outbox.add_credit(number, 5)
            with pytest.raises(KeyError):
                await outbox.put(number, update(7))
        assert outbox.drain() == ServeUpdate((), ())

    run(check)


@pytest.mark.parametrize("item", [update(1, "\ud800"), update(1, "\ud800", FinishReason.STOP)], ids=["plain", "last"])
def test_what_cannot_be_sent_is_found_out_by_its_own_request(item: GenerateUpdate) -> None:
    async def check() -> None:
        outbox = opened(1, 2)
        await outbox.put(2, update(2))
        with pytest.raises((RuntimeError, ValueError)):
            await outbox.put(1, item)
        methods.SERVE.encode_answer(outbox.drain())

    run(check)
