"""Transport between pools of one process, such as those of tests: copies on a thread of the reader (`copies`).

A pool's memory is read only while its transport lends it, and `close` waits for that to end: after `close` the pool is
not accessed any more.
"""

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from tandem.core.clock import Clock
from tandem.core.errors import ConfigurationError, TransportError
from tandem.transport.base import MemoryPool, Peer
from tandem.transport.blocks import Run
from tandem.transport.card import Identity, accept, describe, seal
from tandem.transport.copies import CopyTransport


class InprocRegistry:
    """Registry of the transports that can reach each other. One per process or per test; thread-safe."""

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


class InprocTransport(CopyTransport):
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
        self._identity, self._registry = identity, registry
        super().__init__(pool, clock)
        self._readers = 0
        self._is_closed = False
        self._changed = threading.Condition()
        try:
            registry.add(identity.incarnation, self)
        except ConfigurationError:
            super().close()
            raise

    def card(self) -> bytes:
        return seal(describe(self.name, self._identity, self._pool, b""), self._identity)

    def connect(self, card: bytes) -> Peer:
        accepted = accept(card, self.name, self._identity, self._pool)
        source = self._registry.find(accepted.incarnation)
        if source is None:
            raise TransportError(f"no worker of incarnation {accepted.incarnation} lives in this process")
        return self._add(accepted, partial(self._copy_runs, source))

    def close(self) -> None:
        self._registry.remove(self._identity.incarnation)
        super().close()
        with self._changed:
            self._is_closed = True
            self._changed.wait_for(lambda: self._readers == 0)

    @contextmanager
    def _lend(self) -> Iterator[MemoryPool]:
        """Yields the pool, which stays alive during the block."""
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

    def _copy_runs(self, source: "InprocTransport", runs: list[Run], unit_bytes: int) -> None:
        with source._lend() as theirs:
            for remote, local, count in runs:
                ctypes.memmove(
                    self._pool.address + local * unit_bytes, theirs.address + remote * unit_bytes, count * unit_bytes
                )
