"""Base of the transports that read their peers' memory directly: reads are copies on a thread of the reader.

Owns their queue of reads, deadlines and peers; `cma` and `inproc` add the connection to a peer. A run is a stretch of
bytes that is contiguous on both sides; each peer has a function that copies several runs.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import ClassVar

from tandem.core.clock import Clock, SystemClock
from tandem.core.errors import ConfigurationError, TransportError
from tandem.transport.base import MemoryPool, Peer
from tandem.transport.blocks import Run, batches, plan_read
from tandem.transport.card import Card
from tandem.transport.peers import LinkPace, PeerTable
from tandem.transport.transfer import Transfer

MAX_RUNS = 1023  # of one step: with one buffer more, what Linux takes in one call
_STEP_BYTES = 16 << 20  # between two looks at deadlines and closed peers

CopyRuns = Callable[[list[Run], int], None]


@dataclass(slots=True)
class _Link:
    copy_runs: CopyRuns
    pace: LinkPace = field(default_factory=LinkPace)
    is_open: bool = True


@dataclass(frozen=True, slots=True)
class _Copy:
    link: _Link
    runs: list[Run]
    unit_bytes: int
    transfer: Transfer
    deadline_s: float


class CopyTransport:
    """Reading half of a `KVTransport`, into `pool`. Subclasses connect to peers and give each a copying function.

    Raises:
        ConfigurationError: the pool is not CPU memory.
    """

    name: ClassVar[str]

    def __init__(self, pool: MemoryPool, clock: Clock | None = None) -> None:
        if not pool.is_cpu:
            raise ConfigurationError(f"the {self.name} transport copies cpu memory, not {pool.device}; use nixl")
        self._pool = pool
        self._clock = clock or SystemClock()
        self._peers: PeerTable[_Link] = PeerTable(self.name, pool)
        self._queue: SimpleQueue[_Copy | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._is_stopped = False
        self._thread = threading.Thread(target=self._work, name=f"kv-{self.name}", daemon=True)
        self._thread.start()

    def _add(self, card: Card, copy_runs: CopyRuns) -> Peer:
        """Adds a peer. `copy_runs` copies at most `MAX_RUNS` runs of units of the given bytes into the pool.

        It is called on the reader's thread and raises `TransportError` if the bytes must not be used.
        """
        return self._peers.add(card, _Link(copy_runs))

    def read(
        self,
        peer: Peer,
        remote_blocks: Sequence[int],
        local_blocks: Sequence[int],
        deadline_s: float | None = None,
    ) -> Transfer:
        """Starts to read blocks; arguments, result and errors as of `KVTransport.read`."""
        link = self._peers.get(peer)
        unit_bytes = peer.unit_bytes
        runs = plan_read(remote_blocks, local_blocks, peer.num_blocks, self._pool.num_bytes // unit_bytes)
        transfer = Transfer(len(remote_blocks) * unit_bytes, self._clock)
        allowance_s = link.pace.begin(transfer.num_bytes)
        limit_s = transfer.started_s + (allowance_s if deadline_s is None else deadline_s)
        with self._lock:
            if self._is_stopped:
                raise TransportError(f"this worker's {self.name} transport is closed")
            self._queue.put(_Copy(link, runs, unit_bytes, transfer, limit_s))
        return transfer

    def disconnect(self, peer: Peer) -> None:
        """Fails the peer's reads and removes it."""
        link = self._peers.pop(peer)
        if link is not None:
            link.is_open = False

    def close(self) -> None:
        """Fail every read; on return no byte of the pool is written any more. May be called again."""
        for link in self._peers.drain():
            link.is_open = False
        with self._lock:
            if not self._is_stopped:
                self._is_stopped = True
                self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _work(self) -> None:
        while (copy := self._queue.get()) is not None:
            started_s = self._clock.now_s()
            seconds = None
            try:
                for step in batches(copy.runs, max(1, min(MAX_RUNS, _STEP_BYTES // copy.unit_bytes))):
                    self._check(copy)
                    copy.link.copy_runs(step, copy.unit_bytes)
                seconds = self._clock.now_s() - started_s
            except TransportError as error:
                failure = error
            copy.link.pace.end(copy.transfer.num_bytes, seconds)
            if seconds is None:
                copy.transfer.fail(failure)
            else:
                copy.transfer.succeed()

    def _check(self, copy: _Copy) -> None:
        if not copy.link.is_open:
            raise TransportError("the peer was disconnected while a read of it was under way")
        if self._clock.now_s() > copy.deadline_s:
            raise TransportError(f"a read of {copy.transfer.num_bytes} bytes missed its deadline")
