"""Peers in one process: a copy from one pool to the other on the reader's own thread.

A pool's memory is read only while its transport lends it, which `close` waits out: on return from `close` nobody
touches it any more.
"""

import ctypes
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue

from tandem.core.clock import Clock, SystemClock
from tandem.core.errors import ConfigurationError, TransportError
from tandem.transport.base import MemoryPool, Peer
from tandem.transport.blocks import Run, batches, plan_read
from tandem.transport.card import Identity, accept, describe, seal
from tandem.transport.peers import LinkPace, PeerTable
from tandem.transport.transfer import Transfer

_STEP_BYTES = 16 << 20  # between two looks at deadlines and closed pools


class InprocRegistry:
    """The transports that can reach each other. One per process or per test; thread-safe."""

    def __init__(self) -> None:
        self._by_incarnation: dict[str, InprocTransport] = {}
        self._lock = threading.Lock()

    def add(self, incarnation: str, transport: "InprocTransport") -> None:
        with self._lock:
            if incarnation in self._by_incarnation:
                raise ConfigurationError(f"incarnation {incarnation} is registered already; each needs its own")
            self._by_incarnation[incarnation] = transport

    def find(self, incarnation: str) -> "InprocTransport | None":
        with self._lock:
            return self._by_incarnation.get(incarnation)

    def remove(self, incarnation: str) -> None:
        with self._lock:
            self._by_incarnation.pop(incarnation, None)


@dataclass(slots=True)
class _Link:
    source: "InprocTransport"
    pace: LinkPace
    is_open: bool = True


@dataclass(frozen=True, slots=True)
class _Copy:
    link: _Link
    runs: list[Run]
    transfer: Transfer
    deadline_s: float


class InprocTransport:
    """`KVTransport` within one process.

    Args:
        pool: CPU memory.
        identity: who we are.
        registry: where peers are found.
    """

    name = "inproc"

    def __init__(
        self, pool: MemoryPool, identity: Identity, registry: InprocRegistry, clock: Clock | None = None
    ) -> None:
        if not pool.is_cpu:
            raise ConfigurationError(f"the inproc transport copies cpu memory, not {pool.device}; use nixl")
        self._pool, self._identity, self._registry = pool, identity, registry
        self._clock = clock or SystemClock()
        self._peers: PeerTable[_Link] = PeerTable(self.name)
        self._queue: SimpleQueue[_Copy | None] = SimpleQueue()
        self._readers = 0
        self._is_closed = False
        self._changed = threading.Condition()
        registry.add(identity.incarnation, self)
        self._thread = threading.Thread(target=self._work, name="kv-inproc", daemon=True)
        self._thread.start()

    def card(self) -> bytes:
        return seal(describe(self.name, self._identity, self._pool, b""), self._identity)

    def connect(self, card: bytes) -> Peer:
        accepted = accept(card, self.name, self._identity, self._pool)
        source = self._registry.find(accepted.incarnation)
        if source is None:
            raise TransportError(f"no worker of incarnation {accepted.incarnation} lives in this process")
        return self._peers.add(accepted, _Link(source, LinkPace()))

    def read(
        self,
        peer: Peer,
        remote_blocks: Sequence[int],
        local_blocks: Sequence[int],
        deadline_s: float | None = None,
    ) -> Transfer:
        link = self._peers.get(peer)
        runs = plan_read(remote_blocks, local_blocks, peer.num_blocks, self._pool.num_blocks)
        transfer = Transfer(len(remote_blocks) * self._pool.page_bytes, self._clock)
        allowance_s = link.pace.begin(transfer.num_bytes)
        limit_s = transfer.started_s + (allowance_s if deadline_s is None else deadline_s)
        with self._changed:
            if self._is_closed:
                raise TransportError("this worker's inproc transport is closed")
            self._queue.put(_Copy(link, runs, transfer, limit_s))
        return transfer

    def disconnect(self, peer: Peer) -> None:
        link = self._peers.pop(peer)
        if link is not None:
            link.is_open = False

    def close(self) -> None:
        for link in self._peers.drain():
            link.is_open = False
        self._registry.remove(self._identity.incarnation)
        with self._changed:
            if not self._is_closed:
                self._is_closed = True
                self._queue.put(None)
            self._changed.wait_for(lambda: self._readers == 0)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    @contextmanager
    def _lend(self) -> Iterator[MemoryPool]:
        """The pool, which stays alive inside."""
        with self._changed:
            if self._is_closed:
                raise TransportError(f"the pool of incarnation {self._identity.incarnation} was closed")
            self._readers += 1
        try:
            yield self._pool
        finally:
            with self._changed:
                self._readers -= 1
                self._changed.notify_all()

    def _work(self) -> None:
        while (copy := self._queue.get()) is not None:
            started_s = self._clock.now_s()
            seconds = None
            try:
                for batch in batches(copy.runs, max(1, _STEP_BYTES // self._pool.page_bytes)):
                    self._copy_batch(copy, batch)
                seconds = self._clock.now_s() - started_s
            except TransportError as error:
                failure = error
            copy.link.pace.end(copy.transfer.num_bytes, seconds)
            if seconds is None:
                copy.transfer.fail(failure)
            else:
                copy.transfer.succeed()

    def _copy_batch(self, copy: _Copy, batch: list[Run]) -> None:
        if not copy.link.is_open:
            raise TransportError("the peer was disconnected while a read of it was under way")
        if self._clock.now_s() > copy.deadline_s:
            raise TransportError(f"a read of {copy.transfer.num_bytes} bytes missed its deadline")
        page = self._pool.page_bytes
        with copy.link.source._lend() as source:
            for remote, local, count in batch:
                ctypes.memmove(self._pool.address + local * page, source.address + remote * page, count * page)
