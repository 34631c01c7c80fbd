"""A worker's queue of updates for a shared stream, until they can be written.

Invariant: each request's updates keep their order and stay within its credit (tokens that its reader permits); a slow
reader of one request delays no other. Updates that arrive while a message is being written are merged, so memory is
bounded by the credits.
"""

import asyncio

from tandem.rpc import methods
from tandem.rpc.messages import GenerateUpdate
from tandem.rpc.plain_updates import is_plain, merged
from tandem.rpc.serve_messages import CallStatus, OtherUpdate, ServeUpdate, TextUpdate

_Item = GenerateUpdate | bytes  # a plain update, or another one, encoded


class SharedOutbox:
    """Queue of updates. Its many writers are the requests, its one reader the stream. Owned by one event loop."""

    def __init__(self) -> None:
        self._items: dict[int, list[_Item]] = {}
        self._ends: list[OtherUpdate] = []
        self._credits: dict[int, int] = {}
        self._has_credit: dict[int, asyncio.Event] = {}
        self._has_updates = asyncio.Event()

    def open(self, number: int, credit: int) -> None:
        """Starts a request. `credit`: number of tokens that may be put."""
        self._credits[number] = credit

    def add_credit(self, number: int, num_tokens: int) -> None:
        """Permits more tokens; no effect for a request that has ended."""
        if number in self._credits:
            self._credits[number] += num_tokens
            if (waiting := self._has_credit.get(number)) is not None:
                waiting.set()

    async def put(self, number: int, update: GenerateUpdate) -> None:
        """Adds an update; waits while the request has no credit.

        Raises:
            RuntimeError, ValueError: it cannot be sent.
        """
        while self._credits[number] <= 0:
            waiting = self._has_credit.setdefault(number, asyncio.Event())
            waiting.clear()
            await waiting.wait()
        self._credits[number] -= len(update.output.token_ids)
        self._append(number, _checked(update))
        self._has_updates.set()

    def end(self, number: int, status: CallStatus) -> None:
        """Queues the status with which a request ended."""
        self._ends.append(OtherUpdate(number, status=status))
        self._has_updates.set()

    def forget(self, number: int) -> None:
        """Stops accepting updates of a request, which puts none any more."""
        del self._credits[number]
        self._has_credit.pop(number, None)

    def wake(self) -> None:
        """Ends a `wait` even if there is nothing to write."""
        self._has_updates.set()

    async def wait(self) -> None:
        """Waits until there is something to write."""
        await self._has_updates.wait()

    def drain(self) -> ServeUpdate:
        """Removes and returns everything queued."""
        self._has_updates.clear()
        waiting, self._items = self._items, {}
        ends, self._ends = self._ends, []
        plain: list[TextUpdate] = []
        others: list[OtherUpdate] = []
        for number, items in waiting.items():
            only = items[0]
            if len(items) == 1 and isinstance(only, GenerateUpdate):
                plain.append(TextUpdate(number, only.output.token_ids, only.output.text))
            else:
                others += (OtherUpdate(number, item if isinstance(item, bytes) else _encoded(item)) for item in items)
        return ServeUpdate(tuple(plain), (*others, *ends))

    def _append(self, number: int, item: _Item) -> None:
        items = self._items.setdefault(number, [])
        before = items[-1] if items else None
        if isinstance(before, GenerateUpdate) and isinstance(item, GenerateUpdate):
            items[-1] = merged(before, item)
        else:
            items.append(item)


def _checked(update: GenerateUpdate) -> _Item:
    """NOTE: an update that cannot be sent is detected here, where it concerns its own request alone."""
    if not is_plain(update):
        return _encoded(update)
    update.output.text.encode()
    return update


def _encoded(update: GenerateUpdate) -> bytes:
    return methods.GENERATE.encode_answer(update)
