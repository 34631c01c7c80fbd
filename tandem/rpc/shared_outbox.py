"""Outbox of a worker for a stream that many requests share, until it can be written.

Invariant: each request's updates keep their order and stay within the room that its caller made; a slow caller of one
request holds up no other. While a message is being written, what comes is joined, so memory is bounded by the rooms.
"""

import asyncio

from tandem.rpc import methods
from tandem.rpc.joining import is_plain, joined
from tandem.rpc.messages import GenerateUpdate
from tandem.rpc.serve_messages import Delivery, Ending, Plain, ServeUpdate

_Item = GenerateUpdate | bytes  # a plain update, or another one, encoded


class SharedOutbox:
    """Requests put, one writer takes. Owned by one event loop."""

    def __init__(self) -> None:
        self._items: dict[int, list[_Item]] = {}
        self._endings: list[Delivery] = []
        self._rooms: dict[int, int] = {}
        self._has_room: dict[int, asyncio.Event] = {}
        self._has_updates = asyncio.Event()

    def open(self, number: int, room: int) -> None:
        """A request begins; `room`: tokens that may be put."""
        self._rooms[number] = room

    def make_room(self, number: int, num_tokens: int) -> None:
        """Harmless for a request that has ended."""
        if number in self._rooms:
            self._rooms[number] += num_tokens
            if (waiting := self._has_room.get(number)) is not None:
                waiting.set()

    async def put(self, number: int, update: GenerateUpdate) -> None:
        """Waits while the request's caller has room for nothing.

        Raises:
            RuntimeError, ValueError: it cannot be sent.
        """
        while self._rooms[number] <= 0:
            waiting = self._has_room.setdefault(number, asyncio.Event())
            waiting.clear()
            await waiting.wait()
        self._rooms[number] -= len(update.output.token_ids)
        self._append(number, _checked(update))
        self._has_updates.set()

    def end(self, number: int, ending: Ending) -> None:
        """Nothing of this request follows."""
        self._endings.append(Delivery(number, ending=ending))
        self._has_updates.set()

    def forget(self, number: int) -> None:
        """No update of this request will be put any more."""
        del self._rooms[number]
        self._has_room.pop(number, None)

    def wake(self) -> None:
        """End a `wait` although there may be nothing."""
        self._has_updates.set()

    async def wait(self) -> None:
        """Until there is something to write."""
        await self._has_updates.wait()

    def drain(self) -> ServeUpdate:
        """All there is."""
        self._has_updates.clear()
        waiting, self._items = self._items, {}
        endings, self._endings = self._endings, []
        plain: list[Plain] = []
        others: list[Delivery] = []
        for number, items in waiting.items():
            only = items[0]
            if len(items) == 1 and isinstance(only, GenerateUpdate):
                plain.append(Plain(number, only.output.token_ids, only.output.text))
            else:
                others += (Delivery(number, item if isinstance(item, bytes) else _encoded(item)) for item in items)
        return ServeUpdate(tuple(plain), (*others, *endings))

    def _append(self, number: int, item: _Item) -> None:
        items = self._items.setdefault(number, [])
        before = items[-1] if items else None
        if isinstance(before, GenerateUpdate) and isinstance(item, GenerateUpdate):
            items[-1] = joined(before, item)
        else:
            items.append(item)


def _checked(update: GenerateUpdate) -> _Item:
    """NOTE: whatever cannot be sent is found out here, where it concerns its own request alone."""
    if not is_plain(update):
        return _encoded(update)
    update.output.text.encode()
    return update


def _encoded(update: GenerateUpdate) -> bytes:
    return methods.GENERATE.encode_answer(update)
