"""Stream to one peer: a socket and the only thread that uses it, performing one read at a time.

A read that fails closes the socket before its transfer is failed, so nothing can write its blocks afterwards. The next
read connects again, to the same incarnation only.
"""

import contextlib
import itertools
import secrets
import socket
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass

from tandem.core.clock import Clock
from tandem.core.errors import IncompatiblePeerError, TransportError
from tandem.tls.files import Material, TlsFiles
from tandem.transport.card import Card, Identity
from tandem.transport.memory import PoolBytes
from tandem.transport.tcp import wire
from tandem.transport.tcp.encryption import shake_hands, wrap_client
from tandem.transport.tcp.queue import PendingRead, ReadQueue

HANDSHAKE_S = 3.0  # default timeout of each answer while connecting
_TICK_S = 0.05  # between two looks at the deadline
_KEY_PURPOSE = "tcp"
_DISCONNECTED = "the peer was disconnected while a read of it was under way"


@dataclass(frozen=True, slots=True)
class Address:
    """Address on which a peer listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


Connect = Callable[[wire.Tick, float], socket.socket]


def open_connection(
    address: Address,
    card: Card,
    identity: Identity,
    tick: wire.Tick,
    timeout_s: float = HANDSHAKE_S,
    tls: TlsFiles | None = None,
) -> socket.socket:
    """Connects to the worker that `card` describes and authenticates both sides.

    Args:
        tick: called from time to time once the connection is established; raises to give up.
        timeout_s: timeout of an answer.
        tls: this process's certificate; None = unencrypted.

    Raises:
        IncompatiblePeerError: another incarnation or another program listens there, or the secrets differ.
        TransportError: the peer does not answer, or not in this protocol.
    """
    try:
        connection = socket.create_connection((address.host, address.port), timeout=timeout_s)
    except (OSError, UnicodeError) as error:  # NOTE: of a host's name that is none, such as one with a long label
        raise TransportError(f"cannot reach peer {card.incarnation} at {address}: {error}") from error
    try:
        if tls is not None:
            connection = _encrypted(connection, tls.current(), timeout_s)
        _shake_hands(connection, address, card, identity, tick)
    except OSError as error:
        connection.close()
        raise TransportError(f"the handshake with {address} broke off: {error}{_hint(error, tls)}") from error
    except TransportError:
        connection.close()
        raise
    return connection


def _encrypted(connection: socket.socket, material: Material, timeout_s: float) -> socket.socket:
    encrypted = wrap_client(connection, material)
    try:
        shake_hands(encrypted, material, timeout_s)
    except (OSError, IncompatiblePeerError):
        encrypted.close()
        raise
    return encrypted


def _hint(error: OSError, tls: TlsFiles | None) -> str:
    if tls is None or not isinstance(error, ssl.SSLError):
        return ""
    return "; give every process of the deployment a tls_dir with certificates of the same CA"


def _shake_hands(connection: socket.socket, address: Address, card: Card, identity: Identity, tick: wire.Tick) -> None:
    wire.tune(connection)
    wire.set_timeouts(connection, receive_s=_TICK_S, send_s=HANDSHAKE_S)
    magic, version, nonce, met = wire.HELLO.unpack(wire.receive(connection, wire.HELLO.size, tick))
    if magic != wire.MAGIC or version != wire.PROTOCOL_VERSION:
        raise IncompatiblePeerError(
            f"{address} speaks {magic!r} version {version}; this worker speaks {wire.MAGIC!r} version"
            f" {wire.PROTOCOL_VERSION}"
        )
    expected = bytes.fromhex(card.incarnation)
    if met != expected:
        raise IncompatiblePeerError(
            f"{address} is now incarnation {met.hex()}, the card is of {card.incarnation}: that worker has restarted"
        )
    key, own_nonce = identity.key(_KEY_PURPOSE), secrets.token_bytes(wire.NONCE_BYTES)
    proof = wire.client_mac(key, nonce, own_nonce, expected)
    connection.sendall(wire.AUTH.pack(wire.MAGIC, wire.PROTOCOL_VERSION, own_nonce, expected, proof))
    status, page_bytes, num_blocks, mac = wire.WELCOME.unpack(wire.receive(connection, wire.WELCOME.size, tick))
    pool = repr((page_bytes, num_blocks)).encode()
    is_known = secrets.compare_digest(mac, wire.server_mac(key, nonce, own_nonce, expected, pool))
    if status != wire.Status.OK or not is_known:
        raise IncompatiblePeerError(f"{address} and this worker do not share a cluster secret")
    if (page_bytes, num_blocks) != (card.page_bytes, card.num_blocks):
        raise IncompatiblePeerError(
            f"{address} has {num_blocks} blocks of {page_bytes} bytes, its card says {card.num_blocks} of"
            f" {card.page_bytes}"
        )


class Stream:
    """Performs the reads of `queue` until the queue is closed.

    Args:
        connection: an authenticated connection; None = connect with the first read.
        connect: opens a new connection, given a function to call from time to time, which raises to give up, and the
            timeout of an answer in seconds; called on the stream's thread.
        tls: this process's certificate; a connection that was made with former files is replaced before the next read.
        material: content of these files before `connection` was made; None = there was none.
    """

    def __init__(
        self,
        queue: ReadQueue,
        pool: PoolBytes,
        clock: Clock,
        connection: socket.socket | None,
        connect: Connect,
        tls: TlsFiles | None = None,
        material: Material | None = None,
    ) -> None:
        self._tls, self._material = tls, material
        self._queue, self._pool, self._clock, self._connect = queue, pool, clock, connect
        self._connection = connection
        self._request_ids = itertools.count(1)
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._work, name="kv-tcp-read", daemon=True)
        self._thread.start()

    def abort(self) -> None:
        """Close the connection, which fails the read in progress. The queue must have been closed before."""
        with self._lock:
            if self._connection is not None:
                with contextlib.suppress(OSError):
                    self._connection.shutdown(socket.SHUT_RDWR)

    def join(self) -> None:
        """Wait for the thread to end; returns at once if called from that thread (in a callback)."""
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _work(self) -> None:
        while (read := self._queue.get()) is not None:
            try:
                started_s = self._clock.now_s()
                self._perform(read)
            except (OSError, TransportError) as error:
                self._drop()
                self._queue.fail(read, self._explain(error))
            else:
                self._queue.succeed(read, self._clock.now_s() - started_s)
        self._drop()

    def _explain(self, error: OSError | TransportError) -> TransportError:
        if self._queue.is_closed:
            return TransportError(_DISCONNECTED)
        if isinstance(error, TransportError):
            return error
        return TransportError(f"the connection broke during a read: {error}")

    def _drop(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def _perform(self, read: PendingRead) -> None:
        def tick() -> None:
            self._queue.expire()
            if self._queue.is_closed:
                raise TransportError(_DISCONNECTED)
            if self._clock.now_s() > read.deadline_s:
                raise TransportError(
                    f"a read of {read.transfer.num_bytes} bytes missed its deadline: the peer has stopped or is slow"
                )

        tick()
        connection = self._connected(tick, read.deadline_s)
        for start in range(0, len(read.runs), wire.MAX_REQUEST_RUNS):
            runs = read.runs[start : start + wire.MAX_REQUEST_RUNS]
            request_id = next(self._request_ids)
            wanted = [(run.remote, run.num_blocks) for run in runs]
            connection.sendall(wire.pack_request(request_id, wanted, in_pieces=read.is_in_pieces))
            views = [self._pool.blocks(run.local, run.num_blocks, read.unit_bytes) for run in runs]
            self._expect_answer(connection, request_id, sum(map(len, views)), tick)
            wire.receive_into(connection, views, tick)

    def _current_material(self) -> Material | None:
        return None if self._tls is None else self._tls.current()

    def _connected(self, tick: wire.Tick, deadline_s: float) -> socket.socket:
        material = self._current_material()
        if material is not self._material:
            self._drop()
        if self._connection is None:
            self._material = material
            connection = self._connect(tick, min(HANDSHAKE_S, max(_TICK_S, deadline_s - self._clock.now_s())))
            with self._lock:
                self._connection = connection
            tick()
        return self._connection

    def _expect_answer(self, connection: socket.socket, request_id: int, num_bytes: int, tick: wire.Tick) -> None:
        answer = wire.ANSWER.unpack(wire.receive(connection, wire.ANSWER.size, tick))
        if answer == (request_id, wire.Status.OK, num_bytes):
            return
        answered_id, status, length = answer
        if status == wire.Status.REFUSED and length <= wire.MAX_REFUSAL_BYTES and answered_id in (0, request_id):
            reason = wire.receive(connection, length, tick).decode(errors="replace")
            raise TransportError(f"the peer refused a read: {reason}")
        raise TransportError(
            f"the peer answered {answer} to request {request_id} for {num_bytes} bytes; it does not follow the protocol"
        )
