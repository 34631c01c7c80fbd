"""Peers that a transport is connected to, and the rate of each, which sets the timeouts of reads."""

import itertools
import threading
from typing import Generic, TypeVar

from tandem.core.errors import CapacityError, TransportError
from tandem.transport.base import MemoryPool, Peer
from tandem.transport.card import Card

Link = TypeVar("Link")

MAX_PENDING_READS = 4096  # per peer
MIN_DEADLINE_S = 3.0  # the shortest timeout of a read
DEADLINE_FACTOR = 5.0  # of the time that the measured rate suggests
ASSUMED_BYTES_PER_S = 100e6  # until a rate has been measured: a slow network
_MEASURABLE_BYTES = 1 << 20  # below, latency is most of the time
_SMOOTHING = 0.2  # weight of the newest rate


class PeerTable(Generic[Link]):
    """The transport's open links by peer. Thread-safe; `drain` closes it for good."""

    def __init__(self, transport: str, pool: MemoryPool) -> None:
        self._transport, self._pool = transport, pool
        self._links: dict[Peer, Link] = {}
        self._connections = itertools.count(1)
        self._lock = threading.Lock()
        self._is_closed = False

    def check_open(self) -> None:
        """Raises `TransportError` once drained."""
        if self._is_closed:
            raise TransportError(f"this worker's {self._transport} transport is closed")

    def add(self, card: Card, link: Link) -> Peer:
        """Adds the peer of an accepted card."""
        with self._lock:
            self.check_open()
            peer = peer_of(card, self._pool, next(self._connections))
            self._links[peer] = link
            return peer

    def get(self, peer: Peer) -> Link:
        """Raises `TransportError` when the peer is not connected."""
        with self._lock:
            self.check_open()
            link = self._links.get(peer)
        if link is None:
            raise TransportError(f"{peer} is not connected to this worker; connect to its card again")
        return link

    def pop(self, peer: Peer) -> Link | None:
        """Remove a peer; returns its link, None if it is not connected."""
        with self._lock:
            return self._links.pop(peer, None)

    def drain(self) -> list[Link]:
        """Remove and return all links, and close the table."""
        with self._lock:
            self._is_closed = True
            links = list(self._links.values())
            self._links.clear()
        return links


def peer_of(card: Card, pool: MemoryPool, connection: int) -> Peer:
    """Builds the peer that an accepted card describes. Its unit of reading is a page, or a piece of one."""
    unit_bytes = card.unit_bytes(pool)
    assert unit_bytes is not None, "the card was not accepted"
    num_units = card.page_bytes * card.num_blocks // unit_bytes
    return Peer(card.transport, card.incarnation, num_units, connection, unit_bytes, card.num_ranks, card.stages)


class LinkPace:
    """Measured rate and pending bytes of one peer, from which the timeout of a read is derived. Thread-safe."""

    def __init__(self) -> None:
        self._bytes_per_s: float | None = None
        self._pending_bytes = 0
        self._pending_reads = 0
        self._lock = threading.Lock()

    def begin(self, num_bytes: int) -> float:
        """Add a read of `num_bytes` to the pending ones; returns its timeout in seconds.

        Raises:
            CapacityError: too many reads of this peer are pending.
        """
        with self._lock:
            if self._pending_reads >= MAX_PENDING_READS:
                raise CapacityError(
                    f"{self._pending_reads} reads of one peer are waiting; ask again when some are done"
                )
            self._pending_reads += 1
            self._pending_bytes += num_bytes
            rate = self._bytes_per_s or ASSUMED_BYTES_PER_S
            return max(MIN_DEADLINE_S, DEADLINE_FACTOR * self._pending_bytes / rate)

    def end(self, num_bytes: int, seconds: float | None) -> None:
        """Remove a read from the pending ones. `seconds`: duration of its transfer; None if it failed."""
        with self._lock:
            self._pending_reads -= 1
            self._pending_bytes -= num_bytes
            if seconds is None or num_bytes < _MEASURABLE_BYTES:
                return
            rate = num_bytes / max(seconds, 1e-9)
            previous = self._bytes_per_s or rate
            self._bytes_per_s = previous + _SMOOTHING * (rate - previous)
