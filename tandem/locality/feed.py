"""A worker's side of the index: turns its block events into numbered reports and repairs whatever was lost.

`emit` is what the block pool calls: it only remembers. `flush` is what the worker's reporter calls every so often,
with or without news. Invariant: after a `flush` that returned APPLIED the index has everything emitted before it.
"""

import threading
from collections.abc import Sequence

from tandem.core.events import BlockEvent, BlockStored
from tandem.locality.base import COUNTED_GROUP, LocalityIndex, PublishResult

_MAX_REPORT = 4096


class BlockFeed:
    """Reports one incarnation of a worker to an index. `emit` from any thread, `flush` from one thread at a time.

    Args:
        max_pending: events kept while the index is away; past this a snapshot replaces them.
    """

    def __init__(self, index: LocalityIndex, worker_id: str, epoch: int, max_pending: int = 65_536) -> None:
        self._index = index
        self._worker_id = worker_id
        self._epoch = epoch
        self._max_pending = max_pending
        self._lock = threading.Lock()
        self._held: set[bytes] = set()
        self._pending: list[BlockEvent] = []
        self._unconfirmed: Sequence[BlockEvent] | None = None
        self._sequence = 0
        self._needs_snapshot = True

    def emit(self, event: BlockEvent) -> None:
        """A `BlockEventSink`: remember one change."""
        if event.group != COUNTED_GROUP:
            return
        with self._lock:
            if isinstance(event, BlockStored):
                self._held.add(event.block_hash)
            else:
                self._held.discard(event.block_hash)
            if len(self._pending) >= self._max_pending:
                self._needs_snapshot = True
            if not self._needs_snapshot:
                self._pending.append(event)

    def flush(self) -> PublishResult:
        """Bring the index up to date: with the news, an empty report as a sign of life, or a snapshot when it asks.

        STALE means that a later incarnation of this worker reports now; ask again later, it may end. RESYNC means that
        the index lost the snapshot before it was complete; the next `flush` sends another.

        Raises:
            LocalityUnavailableError: nothing is lost; call again later.
        """
        while not self._needs_snapshot:
            report = self._next_report()
            result = self._index.publish(self._worker_id, self._epoch, report, self._sequence + 1)
            if result is PublishResult.RESYNC:
                self._needs_snapshot = True
            elif result is PublishResult.STALE or not self._confirm():
                return result
        return self._send_snapshot()

    def _next_report(self) -> Sequence[BlockEvent]:
        """An unconfirmed report goes again unchanged: the index may have applied it although no answer came."""
        with self._lock:
            if self._unconfirmed is None:
                self._unconfirmed = self._pending[:_MAX_REPORT]
                del self._pending[:_MAX_REPORT]
            return self._unconfirmed

    def _confirm(self) -> bool:
        """Count a report as applied; whether there is more."""
        with self._lock:
            self._sequence += 1
            self._unconfirmed = None
            return bool(self._pending)

    def _send_snapshot(self) -> PublishResult:
        """Its number leaves one out: if it gets lost, a report that was late cannot make the next one look in order."""
        with self._lock:
            held = tuple(self._held)
            self._sequence += 2
            self._unconfirmed = None
            self._pending.clear()
            self._needs_snapshot = False
        return self._index.replace(self._worker_id, self._epoch, held, self._sequence)
