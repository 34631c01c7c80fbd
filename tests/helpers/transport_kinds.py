"""One way to make sources and readers of every kind of transport, for tests that hold for all of them."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from tandem.transport.base import KVTransport
from tandem.transport.card import Identity
from tandem.transport.inproc import InprocRegistry, InprocTransport
from tests.helpers.secret import SECRET
from tests.helpers.transport_pools import COMPATIBILITY, Pages, pool_of, seeded_pages
from tests.helpers.transport_process import SourceProcess, SourceSpec, build_transport


class Source(Protocol):
    """A pool that can be read from."""

    @property
    def card(self) -> bytes: ...

    @property
    def pages(self) -> Pages: ...

    def stop(self) -> None:
        """End it in good order."""


@dataclass
class LocalSource:
    """A source in this process."""

    transport: KVTransport
    card: bytes
    pages: Pages

    def stop(self) -> None:
        self.transport.close()


class Kind:
    """One kind of transport. In-process peers find each other in this object's registry."""

    def __init__(self, name: str, tls_dir: Path | None = None) -> None:
        self.name = name
        self._tls_dir = None if tls_dir is None else str(tls_dir)
        self._registry = InprocRegistry()

    @property
    def has_processes(self) -> bool:
        return self.name != "inproc"

    def reader(
        self, pages: Pages, identity: Identity | None = None, num_ranks: int = 1, piece_bytes: int | None = None
    ) -> KVTransport:
        identity, pool = identity or Identity(COMPATIBILITY, SECRET), pool_of(pages, num_ranks, piece_bytes)
        if not self.has_processes:
            return InprocTransport(pool, identity, self._registry)
        return build_transport(SourceSpec(self.name, tls_dir=self._tls_dir), pool, identity)

    @contextmanager
    def source(self, spec: SourceSpec) -> Iterator[Source]:
        """A source for which `spec` holds but for the kind, in its own process where the kind has processes."""
        spec = replace(spec, transport=self.name, tls_dir=self._tls_dir)
        if self.has_processes:
            with SourceProcess(spec) as process:
                yield process
            return
        pages = seeded_pages(spec.seed, spec.num_blocks, spec.page_bytes)
        identity = Identity(spec.compatibility, secret=bytes.fromhex(spec.secret))
        transport = InprocTransport(pool_of(pages, spec.num_ranks, spec.piece_bytes), identity, self._registry)
        yield LocalSource(transport, transport.card(), pages)
        transport.close()

    @contextmanager
    def process(self, spec: SourceSpec) -> Iterator[SourceProcess]:
        """A source that can be killed and stopped."""
        with SourceProcess(replace(spec, transport=self.name, tls_dir=self._tls_dir)) as process:
            yield process


def resources() -> tuple[int, int]:
    """(open file descriptors, Python threads) of this process."""
    return len(os.listdir("/proc/self/fd")), threading.active_count()
