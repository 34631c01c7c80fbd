"""Queue of the reads of one peer that no stream has started yet.

Each read leaves it exactly once: started by a stream, expired, or failed on close.
"""

import threading
from collections import deque
from dataclasses import dataclass

from tandem.core.clock import Clock
from tandem.core.errors import TransportError
from tandem.transport.blocks import Run
from tandem.transport.peers import LinkPace
from tandem.transport.transfer import Transfer


@dataclass(frozen=True, slots=True, eq=False)
class PendingRead:
    """A read to be performed by a stream. `deadline_s` is a time of the transport's clock."""

    transfer: Transfer
    runs: list[Run]
    unit_bytes: int
    is_in_pieces: bool
    deadline_s: float


class ReadQueue:
    """FIFO queue of reads with deadlines. Thread-safe. Fails the reads it drops, and updates the peer's `LinkPace`."""

    def __init__(self, clock: Clock, pace: LinkPace) -> None:
        self._clock, self._pace = clock, pace
        self._reads: deque[PendingRead] = deque()
        self._changed = threading.Condition()
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def put(self, read: PendingRead) -> None:
        """Raises `TransportError` once closed."""
        with self._changed:
            if self._is_closed:
                raise TransportError("the peer was disconnected")
            self._reads.append(read)
            self._changed.notify()

    def get(self) -> PendingRead | None:
        """The next read, waiting for one; None once closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._reads or self._is_closed)
            return self._reads.popleft() if self._reads else None

    def expire(self) -> None:
        """Fail the reads that waited past their deadline, for which nothing was sent or received."""
        now_s = self._clock.now_s()
        with self._changed:
            overdue = [read for read in self._reads if read.deadline_s < now_s]
            for read in overdue:
                self._reads.remove(read)
        for read in overdue:
            self.fail(read, TransportError("a read waited past its deadline behind others of the same peer"))

    def close(self) -> None:
        """Fails all waiting reads; `get` returns None from now on."""
        with self._changed:
            self._is_closed = True
            waiting = list(self._reads)
            self._reads.clear()
            self._changed.notify_all()
        for read in waiting:
            self.fail(read, TransportError("the peer was disconnected before a read of it began"))

    def fail(self, read: PendingRead, error: TransportError) -> None:
        """End a read that was not completed."""
        self._pace.end(read.transfer.num_bytes, None)
        read.transfer.fail(error)

    def succeed(self, read: PendingRead, seconds: float) -> None:
        """End a read whose bytes took `seconds`."""
        self._pace.end(read.transfer.num_bytes, seconds)
        read.transfer.succeed()
