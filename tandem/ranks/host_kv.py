"""KV memory of a further host's ranks: other workers read it there, and the leader of the group has it filled there.

Invariant: only bytes of this host's ranks are served or written (`MemoryPool.held_bytes`).
"""

import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from tandem.compute import shared_pages
from tandem.compute.page_bytes import LocalPageBytes
from tandem.core.errors import IncompatiblePeerError, TandemError, TransportError
from tandem.ranks.kv_messages import (
    ClosePool,
    ConnectPeer,
    DisconnectPeer,
    Done,
    Failed,
    Inspect,
    Inspected,
    KVAnswer,
    KVCall,
    OpenPool,
    PoolOpened,
    ReadEnded,
    ReadPeer,
)
from tandem.tls.files import TlsFiles
from tandem.transport.base import MemoryPool, Peer
from tandem.transport.card import Identity
from tandem.transport.tcp.transport import TcpConfig, TcpTransport
from tandem.transport.transfer import Transfer

_THREADS = 4  # NOTE: a peer that does not answer holds one up for seconds

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KVEndpoint:
    """Address at which other workers read the KV of this host, and this host's credentials.

    Args:
        secret: of the cluster.
        port: 0 = any free one.
        advertise_host: to which peers connect, if not `bind_host`.
        tls: this process's certificate; None = blocks are readable on the wire.
    """

    secret: bytes = field(repr=False)
    bind_host: str = "127.0.0.1"
    port: int = 0
    advertise_host: str | None = None
    tls: TlsFiles | None = None


@dataclass(frozen=True, slots=True)
class _Pool:
    transport: TcpTransport
    bytes_: LocalPageBytes


class HostKV:
    """Serves the leader's calls about the KV in `memory`, a file descriptor that must stay open until `close`.

    Args:
        answer: sends an answer to the call of that number; called on threads of this object.
    """

    def __init__(self, endpoint: KVEndpoint, memory: int, answer: Callable[[int, KVAnswer], None]) -> None:
        self._endpoint, self._memory, self._answer = endpoint, memory, answer
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="tandem-host-kv")
        self._pool: _Pool | None = None
        self._peers: dict[int, Peer] = {}
        self._is_closed = False

    def take(self, number: int, call: KVCall) -> None:
        """Starts serving a call. NOTE: a call that needs the answer to another one comes after that answer."""
        if not self._is_closed:
            self._threads.submit(self._serve, number, call)

    def close(self) -> None:
        """Ends all reads and all connections of peers. `take` must not be called meanwhile."""
        self._is_closed = True
        self._threads.shutdown(wait=True, cancel_futures=True)
        if self._pool is not None:
            self._pool.transport.close()

    def _serve(self, number: int, call: KVCall) -> None:
        try:
            match call:
                case OpenPool():
                    self._answer(number, self._open(call))
                case ReadPeer():
                    self._read(number, call)
                case ConnectPeer(connection, card):
                    self._peers[connection] = self._opened.transport.connect(card)
                    self._answer(number, Done())
                case DisconnectPeer(connection):
                    peer = self._peers.pop(connection, None)
                    if peer is not None:
                        self._opened.transport.disconnect(peer)
                    self._answer(number, Done())
                case Inspect(crc32s, are_finite):
                    found = self._opened.bytes_
                    finite = found.are_finite(are_finite)
                    self._answer(number, Inspected(tuple(found.crc32s(crc32s)), tuple(finite)))
                case ClosePool():
                    self._opened.transport.close()
                    self._answer(number, Done())
        except TandemError as error:
            self._answer(number, Failed(str(error), isinstance(error, IncompatiblePeerError)))
        except Exception as error:  # the edge of a thread: without an answer, the leader waits until its timeout
            _logger.exception("a call about the KV of this host failed: %s", type(call).__name__)
            self._answer(number, Failed(f"{type(error).__name__}: {error}"))

    def _open(self, call: OpenPool) -> PoolOpened:
        if self._pool is not None:
            raise TransportError("the KV of this host is read already")
        size, num_bytes = os.fstat(self._memory).st_size, call.num_blocks * call.page_bytes
        if size != num_bytes:
            raise TransportError(f"the memory for KV has {size} bytes here, and not {num_bytes}")
        pages = shared_pages.map_pages(self._memory, call.num_ranks, call.num_blocks // call.num_ranks, call.page_bytes)
        pool = MemoryPool(
            address=pages.data_ptr(),
            page_bytes=call.page_bytes,
            num_blocks=call.num_blocks,
            device="cpu",
            owner=pages,
            num_ranks=call.num_ranks,
            piece_bytes=call.piece_bytes,
            stages=call.stages,
            num_hosts=call.num_hosts,
            host=call.host,
        )
        given = self._endpoint
        identity = Identity(call.compatibility, given.secret, call.incarnation)
        config = TcpConfig(given.bind_host, given.port, given.advertise_host, tls=given.tls)
        self._pool = _Pool(TcpTransport(pool, identity, config), LocalPageBytes(pages))
        address = self._pool.transport.address
        return PoolOpened(address.host, address.port)

    def _read(self, number: int, call: ReadPeer) -> None:
        peer = self._peers.get(call.connection)
        if peer is None:
            raise TransportError("the peer was disconnected")
        transfer = self._opened.transport.read(peer, _listed(call.remote), _listed(call.local), call.deadline_s)
        transfer.add_done_callback(lambda ended: self._tell(number, ended))

    def _tell(self, number: int, transfer: Transfer) -> None:
        error = None if transfer.error is None else str(transfer.error)
        self._answer(number, ReadEnded(error, transfer.is_over))
        if not transfer.is_over:
            transfer.add_over_callback(lambda _: self._answer(number, ReadEnded(error, is_over=True)))

    @property
    def _opened(self) -> _Pool:
        """The pool that `OpenPool` opened. Raises `TransportError` if there is none."""
        if self._pool is None:
            raise TransportError("the KV of this host is not read yet")
        return self._pool


def _listed(units: Sequence[int]) -> list[int]:
    return list(units)
