"""Queues of requests that no live worker can serve: they wait for a worker to start or to return.

Invariant: among requests that the same workers could serve, only the first asks, so an outage costs the routers a few
calls a second however many wait. Requests with other needs have queues of their own: a stream that has begun needs the
same version of the model.
"""

from collections.abc import Awaitable, Callable, Hashable
from typing import TypeVar

from prometheus_client import Gauge

from tandem.gateway.history import RequestRecord
from tandem.gateway.waiting_line import Refusal, WaitingLine

T = TypeVar("T")


class OutageLines:
    """The outage queues of one gateway, by need. Arguments as of `WaitingLine`."""

    def __init__(self, timeout_s: float, waiting: Gauge) -> None:
        self._timeout_s = timeout_s
        self._waiting = waiting
        self._lines: dict[Hashable, WaitingLine] = {}

    def __len__(self) -> int:
        return len(self._lines)

    async def ask(
        self,
        needs: Hashable,
        waits_for: tuple[type[Refusal], ...],
        priority: int,
        question: Callable[[], Awaitable[T]],
        record: RequestRecord,
    ) -> T:
        """Like `WaitingLine.ask`, among requests with the same `needs`; the wait is recorded as the stage `outage`."""
        key = (needs, waits_for)
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = WaitingLine(self._timeout_s, self._waiting, waits_for, "outage")
        try:
            return await line.ask(priority, question, record)
        finally:
            if line.is_empty and self._lines.get(key) is line:
                del self._lines[key]
