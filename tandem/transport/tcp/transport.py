"""`KVTransport` (of `transport.base`) over TCP: a server for our pool, and streams that read peers' pools into it."""

import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from tandem.core.clock import Clock, SystemClock
from tandem.core.errors import ConfigurationError, IncompatiblePeerError, TransportError
from tandem.tls.files import TlsFiles
from tandem.transport.base import MemoryPool, Peer
from tandem.transport.blocks import Run, plan_read
from tandem.transport.card import Card, Identity, accept, describe, seal
from tandem.transport.memory import PoolBytes
from tandem.transport.peers import LinkPace, PeerTable
from tandem.transport.tcp import wire
from tandem.transport.tcp.client import HANDSHAKE_S, Address, Stream, open_connection
from tandem.transport.tcp.queue import PendingRead, ReadQueue
from tandem.transport.tcp.server import BlockServer
from tandem.transport.transfer import Transfer


@dataclass(frozen=True, slots=True)
class TcpConfig:
    """Configuration of the server and of reads.

    Args:
        bind_host: the address to listen on.
        port: port to listen on; 0 = any free one.
        advertise_host: the address to which peers connect, if not `bind_host`; required if that is a wildcard.
        num_streams: connections to each peer, each with a thread; more let reads overtake each other.
        tls: this worker's certificate; None = blocks are readable on the wire.
    """

    bind_host: str = "127.0.0.1"
    port: int = 0
    advertise_host: str | None = None
    num_streams: int = 1
    tls: TlsFiles | None = None

    def __post_init__(self) -> None:
        if self.advertise_host is None and self.bind_host in ("", "0.0.0.0", "::"):
            raise ConfigurationError(f"bind_host={self.bind_host!r} is no address to connect to; set advertise_host")
        if not 1 <= self.num_streams <= 16:
            raise ConfigurationError(f"num_streams={self.num_streams} must be from 1 to 16")


@dataclass(frozen=True, slots=True)
class _HostLink:
    """Connections to one host of a peer."""

    queue: ReadQueue
    pace: LinkPace
    streams: tuple[Stream, ...]

    def close(self) -> None:
        self.queue.close()
        for stream in self.streams:
            stream.abort()
        for stream in self.streams:
            stream.join()

    def read(
        self, runs: list[Run], unit_bytes: int, is_in_pieces: bool, limit_s: float | None, clock: Clock
    ) -> Transfer:
        transfer = Transfer(sum(run.num_blocks for run in runs) * unit_bytes, clock)
        allowance_s = self.pace.begin(transfer.num_bytes)
        until_s = transfer.started_s + (allowance_s if limit_s is None else limit_s)
        self.queue.put(PendingRead(transfer, runs, unit_bytes, is_in_pieces, until_s))
        return transfer


@dataclass(frozen=True, slots=True)
class _Link:
    """Connections to all hosts of a peer."""

    hosts: tuple[_HostLink, ...]

    def close(self) -> None:
        for host in self.hosts:
            host.close()


class TcpTransport:
    """`KVTransport` over TCP.

    Args:
        pool: CPU memory.
        identity: who we are.

    Raises:
        ConfigurationError: the pool is not in CPU memory, or the address cannot be listened on.
    """

    name = "tcp"

    def __init__(
        self, pool: MemoryPool, identity: Identity, config: TcpConfig | None = None, clock: Clock | None = None
    ) -> None:
        config = config or TcpConfig()
        self._pool, self._bytes, self._identity, self._config = pool, PoolBytes(pool), identity, config
        self._clock = clock or SystemClock()
        self._peers: PeerTable[_Link] = PeerTable(self.name, pool)
        try:
            self._server = BlockServer(pool, identity, config.bind_host, config.port, config.tls)
        except OSError as error:
            raise ConfigurationError(f"cannot listen on {config.bind_host}:{config.port}: {error}") from error
        self.address = Address(config.advertise_host or config.bind_host, self._server.port)

    def card(self) -> bytes:
        return self.card_of((self.address,))

    def card_of(self, addresses: Sequence[Address]) -> bytes:
        """Returns the card of a pool on several hosts, given each host's address.

        NOTE: behind several is a blank, so that releases which know one address refuse them.
        """
        found = " ".join(map(str, addresses)) + " " * (len(addresses) > 1)
        return seal(describe(self.name, self._identity, self._pool, found.encode()), self._identity)

    def connect(self, card: bytes) -> Peer:
        self._peers.check_open()
        accepted = accept(card, self.name, self._identity, self._pool)
        hosts: list[_HostLink] = []
        try:
            for address in _addresses_of(accepted):
                hosts.append(self._connected(accepted, address))
            return self._peers.add(accepted, _Link(tuple(hosts)))
        except TransportError:
            _Link(tuple(hosts)).close()
            raise

    def _connected(self, accepted: Card, address: Address) -> _HostLink:
        limit_s = time.monotonic() + HANDSHAKE_S
        tls = self._config.tls
        material = None if tls is None else tls.current()
        connection = open_connection(address, accepted, self._identity, lambda: _check_time(limit_s, address), tls=tls)
        pace = LinkPace()
        queue = ReadQueue(self._clock, pace)

        def reconnect(tick: wire.Tick, timeout_s: float) -> socket.socket:
            return open_connection(address, accepted, self._identity, tick, timeout_s, tls)

        streams: list[Stream] = []
        try:
            for index in range(self._config.num_streams):
                first = None if index else connection
                streams.append(Stream(queue, self._bytes, self._clock, first, reconnect, tls, material))
        except RuntimeError as error:  # NOTE: of a machine or container without threads
            _HostLink(queue, pace, tuple(streams)).close()
            connection.close()
            raise TransportError(f"no thread can read from {address}: {error}") from error
        return _HostLink(queue, pace, tuple(streams))

    def read(
        self,
        peer: Peer,
        remote_blocks: Sequence[int],
        local_blocks: Sequence[int],
        deadline_s: float | None = None,
    ) -> Transfer:
        """Reads blocks, as `KVTransport.read`. NOTE: a run never spans hosts, since a null block lies between them."""
        hosts, unit_bytes, held = self._peers.get(peer).hosts, peer.unit_bytes, self._pool.held_bytes
        runs = plan_read(remote_blocks, local_blocks, peer.num_blocks, self._pool.num_bytes // unit_bytes)
        if any(not held.start <= run.local * unit_bytes < held.stop for run in runs):
            raise TransportError(f"blocks of another host than {self._pool.host} are not to be read here")
        parts: dict[int, list[Run]] = {}
        for run in runs:
            parts.setdefault(self._host_of(run.remote, peer, len(hosts)), []).append(run)
        is_in_pieces = unit_bytes != self._pool.page_bytes
        begins = [
            partial(hosts[host].read, part, unit_bytes, is_in_pieces, deadline_s, self._clock)
            for host, part in parts.items()
        ]
        return Transfer.begun(begins, self._clock)

    def _host_of(self, unit: int, peer: Peer, num_hosts: int) -> int:
        """Index of the peer's host that has this unit. If all have a copy, the reader's hosts ask different ones."""
        return self._pool.host % num_hosts if peer.num_ranks == 1 else unit * num_hosts // peer.num_blocks

    def disconnect(self, peer: Peer) -> None:
        link = self._peers.pop(peer)
        if link is not None:
            link.close()

    def close(self) -> None:
        for link in self._peers.drain():
            link.close()
        self._server.close()


def _addresses_of(card: Card) -> list[Address]:
    """Address of each host of a peer.

    Raises:
        IncompatiblePeerError: one of them is none, or they cannot share its ranks.
    """
    found = [_parse_address(card, each) for each in card.metadata.decode(errors="replace").split() or [""]]
    if card.num_ranks > 1 and card.num_ranks % len(found):
        raise IncompatiblePeerError(f"peer {card.incarnation} has {card.num_ranks} ranks on {len(found)} hosts")
    return found


def _parse_address(card: Card, words: str) -> Address:
    host, separator, port = words.rpartition(":")
    if not separator or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise IncompatiblePeerError(f"the card of peer {card.incarnation} has no address: {card.metadata[:80]!r}")
    return Address(host, int(port))


def _check_time(limit_s: float, address: Address) -> None:
    if time.monotonic() > limit_s:
        raise TransportError(
            f"{address} did not shake hands within {HANDSHAKE_S:g} s; it has stopped, or uses TLS and this worker none"
        )
