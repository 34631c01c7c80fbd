"""Queues of requests that wait for workers with room, or for a worker to start or to return.

Invariant: among requests that the same workers could serve, only the first asks, so an outage costs the routers a few
calls a second however many wait. Requests with other needs have queues of their own: a stream that has begun needs the
same version of the model. Requests that lost their worker wait for room here too; routers let them go first.
"""

from collections.abc import Awaitable, Callable, Hashable
from functools import partial
from typing import TypeVar

from prometheus_client import Gauge

from tandem.core.errors import CapacityError, NoRoomError
from tandem.gateway.history import RequestRecord
from tandem.gateway.pairing_queue import PairingQueue, QueueTimeouts

T = TypeVar("T")


class PairingQueues:
    """The queues of one gateway: one for each combination of needs.

    Args:
        room_timeout_s: how long requests that no worker has served yet wait for room, seconds.
        outage_timeout_s: how long any request waits for a worker, and one that lost its worker for room, seconds.
        waiting: gauge of the number of waiting requests.
    """

    def __init__(self, room_timeout_s: float, outage_timeout_s: float, waiting: Gauge) -> None:
        self._new = QueueTimeouts(NoRoomError, room_timeout_s, outage_timeout_s)
        self._retried = QueueTimeouts(CapacityError, outage_timeout_s, outage_timeout_s)
        self._waiting = waiting
        self._queues: dict[tuple[Hashable, QueueTimeouts], PairingQueue] = {}

    def __len__(self) -> int:
        return len(self._queues)

    async def run(
        self,
        needs: Hashable,
        is_retry: bool,
        priority: int,
        call: Callable[[PairingQueue], Awaitable[T]],
        record: RequestRecord,
    ) -> T:
        """Returns the result of `call`, repeated at the head of the queue of requests with equal `needs` while it is
        refused. `call` gets this queue.

        Args:
            is_retry: whether the request lost its worker.

        Raises:
            CapacityError, UnavailableError: the last refusal, after the timeout; also any other error that
                `call` raises.
        """
        timeouts = self._retried if is_retry else self._new
        key = (needs, timeouts)
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = PairingQueue(timeouts, self._waiting)
        try:
            return await queue.run(priority, partial(call, queue), record)
        finally:
            if queue.is_empty and self._queues.get(key) is queue:
                del self._queues[key]
