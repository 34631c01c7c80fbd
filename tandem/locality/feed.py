"""Worker's side of the locality index: sends block events as numbered reports and repairs losses by snapshots.

The block pool calls `emit`, which only records the event. The worker's reporter calls `flush` periodically, with or
without events. Invariant: after a `flush` that returned APPLIED, the index contains everything emitted before it.
"""

import threading
from collections.abc import Sequence

from tandem.core.events import BlockEvent, BlockStored
from tandem.locality.base import COUNTED_GROUP, LocalityIndex, PublishResult

_MAX_REPORT = 4096  # events


class BlockFeed:
    """Reports one incarnation of a worker to an index. `emit` from any thread, `flush` from one thread at a time.

    Args:
        max_pending: events kept while the index is unreachable; beyond this a snapshot replaces them.
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
        """Record one event; a `BlockEventSink`."""
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
        """Bring the index up to date: send the events, an empty report as a heartbeat, or a snapshot if requested.

        STALE: a later incarnation of this worker reports now; retry later, as it may end. RESYNC: the index lost the
        snapshot before it was complete; the next `flush` sends another.

        Raises:
            LocalityUnavailableError: the index is unreachable; no event is lost, retry later.
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
        """Returns the report to send. An unconfirmed one is repeated unchanged: the index may have applied it."""
        with self._lock:
            if self._unconfirmed is None:
                self._unconfirmed = self._pending[:_MAX_REPORT]
                del self._pending[:_MAX_REPORT]
            return self._unconfirmed

    def _confirm(self) -> bool:
        """Mark a report as applied; returns whether there are more."""
        with self._lock:
            self._sequence += 1
            self._unconfirmed = None
            return bool(self._pending)

    def _send_snapshot(self) -> PublishResult:
        """Send a snapshot. Its number skips one: if it is lost, a late report cannot make the next seem in order."""
        with self._lock:
            held = tuple(self._held)
            self._sequence += 2
            self._unconfirmed = None
            self._pending.clear()
            self._needs_snapshot = False
        return self._index.replace(self._worker_id, self._epoch, held, self._sequence)
