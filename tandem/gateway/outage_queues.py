"""Queues of requests that no live worker can serve: they wait for a worker to start or to return.

Invariant: among requests that the same workers could serve, only the first asks, so an outage costs the routers a few
calls a second however many wait. Requests with other needs have queues of their own: a stream that has begun needs the
same version of the model. Requests that lost their worker wait for room here too, and go before those that had none:
what is free is theirs first, also where a smaller request would fit.
"""

from collections.abc import Awaitable, Callable, Hashable
from typing import TypeVar

from prometheus_client import Gauge

from tandem.core.errors import CapacityError
from tandem.gateway.capacity_queue import CapacityQueue, Refusal
from tandem.gateway.history import RequestRecord

T = TypeVar("T")


class OutageQueues:
    """The outage queues of one gateway, by need. Arguments as of `CapacityQueue`."""

    def __init__(self, timeout_s: float, waiting: Gauge) -> None:
        self._timeout_s = timeout_s
        self._waiting = waiting
        self._queues: dict[tuple[Hashable, tuple[type[Refusal], ...]], CapacityQueue] = {}

    def __len__(self) -> int:
        return len(self._queues)

    @property
    def lack_room(self) -> bool:
        """Whether requests that wait for room here have not got it; those of other queues are to ask after them."""
        return any(queue.lacks_room for (_, waits_for), queue in self._queues.items() if CapacityError in waits_for)

    async def run(
        self,
        needs: Hashable,
        waits_for: tuple[type[Refusal], ...],
        priority: int,
        call: Callable[[], Awaitable[T]],
        record: RequestRecord,
    ) -> T:
        """Like `CapacityQueue.run`, among requests with equal `needs`; the wait is recorded as the stage `outage`."""
        key = (needs, waits_for)
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = CapacityQueue(self._timeout_s, self._waiting, waits_for, "outage")
        try:
            return await queue.run(priority, call, record)
        finally:
            if queue.is_empty and self._queues.get(key) is queue:
                del self._queues[key]
