"""Locality index, of which workers hold which KV blocks by hash, inside one process: used without Redis and in the
simulator. `locality.base` describes its methods.

A worker's entries carry its slot, a number that is never used twice. A new epoch (run of the worker's process) or
snapshot takes a new slot, which makes all entries with the former one invisible at once; they are pruned when their
block is next written or asked for. Memory is bounded by two generations of blocks (`holders`): when the recent one is
full it becomes the previous one, whose entries are dropped, but for those asked for since. Every method takes one lock;
snapshots take it for short intervals.
"""

import itertools
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tandem.core.clock import Clock, SystemClock
from tandem.core.events import BlockEvent
from tandem.core.hashing import resume_name
from tandem.locality.base import (
    DEFAULT_MAX_BLOCK_REPLICAS,
    KEY_BYTES,
    SILENT_S,
    LocalityStats,
    PublishResult,
    check_hashes,
    check_limit,
    check_report,
    net_changes,
)
from tandem.locality.holders import NOBODY, HolderTable, pack, unpack

_KEYS_PER_TURN = 512  # written under the lock at a time
_FIRST_BLOCKS = 16  # of a chain that are looked up one by one


@dataclass(slots=True)
class _Worker:
    """State of a worker. Its entries do not count before the snapshot under `slot` is `complete`."""

    epoch: int
    seen_s: float
    slot: int | None = None
    complete: bool = False
    sequence: int = 0


class EmbeddedIndex:
    """`LocalityIndex` (see `base`) in this process's memory, about 100 bytes a block. Any thread may call."""

    def __init__(self, max_block_replicas: int = DEFAULT_MAX_BLOCK_REPLICAS, clock: Clock | None = None) -> None:
        check_limit(max_block_replicas)
        self._clock = clock or SystemClock()
        self._max_block_replicas = max_block_replicas
        self._lock = threading.Lock()
        self._table = HolderTable(max_block_replicas)
        self._workers: dict[str, _Worker] = {}
        self._owners: dict[int, str] = {}
        self._next_slot = itertools.count(1)

    def publish(self, worker_id: str, epoch: int, events: Sequence[BlockEvent], sequence: int) -> PublishResult:
        check_report(worker_id, epoch, sequence)
        changes = net_changes(events)
        with self._lock:
            worker = self._current(worker_id, epoch)
            if worker is None:
                return PublishResult.STALE
            if worker.slot is None or not worker.complete or sequence > worker.sequence + 1:
                return PublishResult.RESYNC
            if sequence == worker.sequence + 1:
                self._write(changes, worker.slot)
                worker.sequence = sequence
            return PublishResult.APPLIED

    def replace(self, worker_id: str, epoch: int, hashes: Iterable[bytes], sequence: int) -> PublishResult:
        check_report(worker_id, epoch, sequence)
        hashes = list(hashes)
        check_hashes(hashes)
        keys = [block_hash[:KEY_BYTES] for block_hash in hashes]
        with self._lock:
            slot = self._begin(worker_id, epoch)
        for turn in range(0, len(keys), _KEYS_PER_TURN):
            with self._lock:
                if slot in self._owners:
                    self._write(dict.fromkeys(keys[turn : turn + _KEYS_PER_TURN], True), slot)
        with self._lock:
            return self._commit(worker_id, slot, sequence)

    def leading_blocks(self, hashes: Sequence[bytes]) -> Mapping[str, int]:
        check_hashes(hashes)
        with self._lock:
            return self._walk(hashes) if hashes else {}

    def resumable_blocks(self, hashes: Sequence[bytes], leading: Mapping[str, int]) -> Mapping[str, int]:
        check_hashes(hashes)
        found: dict[str, int] = {}
        with self._lock:
            position = max(leading.values(), default=0)
            while position and len(found) < len(leading):
                key = resume_name(hashes[position - 1])[:KEY_BYTES]
                if holders := self._table.get(key):
                    ids = (self._owners[slot] for slot in self._visible(holders))
                    found |= {name: position for name in ids if name not in found and leading.get(name, 0) >= position}
                    if self._table.is_old(key):
                        self._table.put(key, self._pruned(holders))
                position -= 1
        return found

    def remove_worker(self, worker_id: str) -> None:
        with self._lock:
            self._retire(self._workers.pop(worker_id, None))

    def stats(self) -> LocalityStats:
        with self._lock:
            return LocalityStats(
                num_workers=sum(worker.complete for worker in self._workers.values()),
                num_blocks=self._table.num_blocks,
                num_block_replicas=self._table.num_block_replicas,
                max_block_replicas=self._max_block_replicas,
                num_rotations=self._table.num_rotations,
            )

    def _current(self, worker_id: str, epoch: int) -> _Worker | None:
        """Returns the worker's record of this epoch, creating it for a new epoch; None while a later epoch reports."""
        worker, now_s = self._workers.get(worker_id), self._clock.now_s()
        if worker is not None and epoch < worker.epoch and now_s - worker.seen_s <= SILENT_S:
            return None
        if worker is None or epoch != worker.epoch:
            self._retire(worker)
            worker = self._workers[worker_id] = _Worker(epoch, now_s)
        worker.seen_s = now_s
        return worker

    def _retire(self, worker: _Worker | None) -> None:
        if worker is not None and worker.slot is not None:
            del self._owners[worker.slot]

    def _begin(self, worker_id: str, epoch: int) -> int | None:
        """Returns a new slot for a snapshot, invisible before `_commit`; None while a later epoch reports."""
        worker = self._current(worker_id, epoch)
        if worker is None:
            return None
        self._retire(worker)
        worker.slot, worker.complete = next(self._next_slot), False
        self._owners[worker.slot] = worker_id
        return worker.slot

    def _commit(self, worker_id: str, slot: int | None, sequence: int) -> PublishResult:
        if slot is None:
            return PublishResult.STALE
        if slot not in self._owners:
            return PublishResult.RESYNC
        worker = self._workers[worker_id]
        worker.complete, worker.sequence = True, sequence
        return PublishResult.APPLIED

    def _write(self, changes: Mapping[bytes, bool], slot: int) -> None:
        """Add `slot` to the holders of blocks or remove it, pruning slots that are no longer valid."""
        after: dict[tuple[bytes, bool], bytes] = {}
        for key, held in changes.items():
            before = self._table.get(key)
            if (before, held) not in after:
                others = {other for other in unpack(before) if other in self._owners} - {slot}
                after[before, held] = pack(others | {slot}) if held else pack(others)
            if held or before:
                self._table.put(key, after[before, held])

    def _walk(self, hashes: Sequence[bytes]) -> dict[str, int]:
        """Follow the chain until the last worker drops out. Goes block by block at its start, and to its end while
        blocks are of the previous generation, which moves them to the recent one. Otherwise it leaps, relying on the
        rule that a worker holding a block holds those before it.
        """
        table, leading = self._table, dict[int, int]()
        racing = self._visible(table.get(hashes[0][:KEY_BYTES]))
        num_checked = len(hashes) if table.has_old else _FIRST_BLOCKS
        position = self._step(hashes[:num_checked], racing, leading) if racing else 0
        while racing and position < len(hashes):
            position = self._leap(hashes, position, racing)
            if position < len(hashes):
                self._narrow(racing, table.get(hashes[position][:KEY_BYTES]), position, leading)
        leading.update(dict.fromkeys(racing, len(hashes)))
        return {self._owners[slot]: count for slot, count in leading.items()}

    def _step(self, hashes: Sequence[bytes], racing: set[int], leading: dict[int, int]) -> int:
        """Visit block by block until no worker remains in `racing`; returns the number of blocks visited."""
        table, previous, aged = self._table, NOBODY, list[tuple[bytes, bytes]]()
        for position, block_hash in enumerate(hashes):
            key = block_hash[:KEY_BYTES]
            holders = table.get(key)
            if holders is not previous:
                self._narrow(racing, holders, position, leading)
                previous = holders
                if not racing:
                    break
            if table.is_old(key):
                aged.append((key, holders))
        for key, holders in aged:
            table.put(key, self._pruned(holders))
        return len(hashes)

    def _leap(self, hashes: Sequence[bytes], position: int, racing: set[int]) -> int:
        """Returns the first block from `position` on that some worker of `racing` lacks, by galloping search."""
        get, leap = self._table.get, _FIRST_BLOCKS
        first, beyond = position, len(hashes)
        while first < beyond:
            probe = min(first + leap, beyond) - 1
            if racing.issubset(unpack(get(hashes[probe][:KEY_BYTES]))):
                first, leap = probe + 1, 2 * leap
            else:
                beyond, leap = probe, max(1, (probe - first) // 2)
        return first

    def _narrow(self, racing: set[int], holders: bytes, position: int, leading: dict[int, int]) -> None:
        """Record that workers of `racing` which do not hold block `position` drop out there."""
        lost = racing.difference(unpack(holders))
        racing -= lost
        leading.update(dict.fromkeys(lost, position))

    def _visible(self, holders: bytes) -> set[int]:
        slots = (slot for slot in unpack(holders) if slot in self._owners)
        return {slot for slot in slots if self._workers[self._owners[slot]].complete}

    def _pruned(self, holders: bytes) -> bytes:
        return pack(slot for slot in unpack(holders) if slot in self._owners)
