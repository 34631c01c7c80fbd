"""Queues of requests that no live worker can serve: they wait for a worker to start or to return.

Invariant: among requests that the same workers could serve, only the first asks, so an outage costs the routers a few
calls a second however many wait. Requests with other needs have queues of their own: a stream that has begun needs the
same version of the model. Requests that lost their worker wait for room here too; routers let them go first.
"""

from collections.abc import Awaitable, Callable, Hashable
from functools import partial
from typing import TypeVar

from prometheus_client import Gauge

from tandem.gateway.capacity_queue import CapacityQueue, Refusal
from tandem.gateway.history import RequestRecord

T = TypeVar("T")


class OutageQueues:
    """The outage queues of one gateway: one for each combination of needs. Arguments as of `CapacityQueue`."""

    def __init__(self, timeout_s: float, waiting: Gauge) -> None:
        self._timeout_s = timeout_s
        self._waiting = waiting
        self._queues: dict[tuple[Hashable, tuple[type[Refusal], ...]], CapacityQueue] = {}

    def __len__(self) -> int:
        return len(self._queues)

    async def run(
        self,
        needs: Hashable,
        waits_for: tuple[type[Refusal], ...],
        priority: int,
        call: Callable[[CapacityQueue], Awaitable[T]],
        record: RequestRecord,
    ) -> T:
        """Returns the result of `call`, repeated at the head of the queue of requests with equal `needs` for as long as
        it raises one of `waits_for`. `call` gets this queue. The wait is recorded as the stage `outage`.

        Raises:
            CapacityError, UnavailableError: the last refusal, after the queue's timeout; also any other error that
                `call` raises.
        """
        key = (needs, waits_for)
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = CapacityQueue(self._timeout_s, self._waiting, waits_for, "outage")
        try:
            return await queue.run(priority, partial(call, queue), record)
        finally:
            if queue.is_empty and self._queues.get(key) is queue:
                del self._queues[key]
