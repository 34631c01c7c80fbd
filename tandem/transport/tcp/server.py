"""Server from which authenticated peers read blocks of a pool: one thread accepts, one thread serves each connection.

Every request is range-checked against the pool. After `close` no thread touches the pool any more.
"""

import contextlib
import hmac
import logging
import secrets
import socket
import ssl
import threading
import time

from tandem.core.errors import IncompatiblePeerError, TransportError
from tandem.tls.files import Material, TlsFiles
from tandem.tls.peers import PeerCertificate, chain_of
from tandem.transport.base import NULL_BLOCK, MemoryPool
from tandem.transport.card import Identity
from tandem.transport.memory import PoolBytes
from tandem.transport.tcp import wire
from tandem.transport.tcp.encryption import shake_hands, wrap_server

MAX_CONNECTIONS = 1024
HANDSHAKE_S = 3.0  # for TLS, and again for the handshake of our own protocol
STALLED_CLIENT_S = 30.0  # after which a client that takes no bytes is disconnected
_TICK_S = 0.1  # between two looks at the time
_KEY_PURPOSE = "tcp"
_WITHDRAWN = "the certificate of this connection is not accepted any more"

logger = logging.getLogger(__name__)


class BlockServer:
    """Serves `pool` on `host:port` until closed. `tls`: this process's certificate; None = plain.

    Raises:
        OSError: the address cannot be listened on.
    """

    def __init__(self, pool: MemoryPool, identity: Identity, host: str, port: int, tls: TlsFiles | None) -> None:
        self._tls = tls
        self._pool, self._bytes, self._identity = pool, PoolBytes(pool), identity
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family)
        self.port: int = self._listener.getsockname()[1]
        self._connections: dict[threading.Thread, socket.socket] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._accept, name="kv-tcp-accept", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Abort every connection and wait for their threads."""
        self._closed.set()
        _shutdown(self._listener)
        self._thread.join()
        self._listener.close()
        with self._lock:
            threads = list(self._connections)
            for connection in self._connections.values():
                _shutdown(connection)
        for thread in threads:
            thread.join()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connection, address = self._listener.accept()
            except OSError as error:
                if not self._closed.wait(_TICK_S):  # NOTE: out of file descriptors is no reason to spin or to stop
                    logger.warning("cannot accept a connection for KV blocks: %s", error)
                continue
            if len(self._connections) >= MAX_CONNECTIONS:
                logger.warning("refused %s: %d connections are open", address, MAX_CONNECTIONS)
                connection.close()
                continue
            thread = threading.Thread(target=self._serve, args=(connection,), name="kv-tcp-serve", daemon=True)
            with self._lock:
                self._connections[thread] = connection
            try:
                thread.start()
            except RuntimeError as error:  # NOTE: out of threads is no reason to stop either
                logger.warning("refused %s: %s", address, error)
                with self._lock:
                    self._connections.pop(thread).close()

    def _serve(self, connection: socket.socket) -> None:
        try:
            peer = None
            if self._tls is not None:
                encrypted = connection = self._encrypted(connection, self._tls.current())
                peer = PeerCertificate(self._tls, chain_of(encrypted))
            self._shake_hands(connection)
            wire.set_timeouts(connection, send_s=STALLED_CLIENT_S)
            while True:
                self._answer(connection, peer)
        except (IncompatiblePeerError, ssl.SSLCertVerificationError) as error:
            logger.warning("a connection for KV blocks was refused: %s", error)
        except (OSError, TransportError) as error:
            logger.debug("a connection for KV blocks ended: %s", error)
        finally:
            with self._lock:
                self._connections.pop(threading.current_thread()).close()

    def _encrypted(self, connection: socket.socket, material: Material) -> ssl.SSLSocket:
        """Returns the connection wrapped in TLS. NOTE: `close` must find either the old socket or the new one."""
        with self._lock:
            self._connections[threading.current_thread()] = encrypted = wrap_server(connection, material)
        shake_hands(encrypted, material, HANDSHAKE_S)
        return encrypted

    def _shake_hands(self, connection: socket.socket) -> None:
        limit_s = time.monotonic() + HANDSHAKE_S
        wire.tune(connection)
        wire.set_timeouts(connection, receive_s=_TICK_S, send_s=HANDSHAKE_S)
        nonce = secrets.token_bytes(wire.NONCE_BYTES)
        incarnation = bytes.fromhex(self._identity.incarnation)
        connection.sendall(wire.HELLO.pack(wire.MAGIC, wire.PROTOCOL_VERSION, nonce, incarnation))
        given = wire.receive(connection, wire.AUTH.size, lambda: _check_time(limit_s))
        magic, version, client_nonce, expected, mac = wire.AUTH.unpack(given)
        key = self._identity.key(_KEY_PURPOSE)
        is_known = hmac.compare_digest(mac, wire.client_mac(key, nonce, client_nonce, incarnation))
        if (magic, version, expected) != (wire.MAGIC, wire.PROTOCOL_VERSION, incarnation) or not is_known:
            connection.sendall(wire.WELCOME.pack(wire.Status.UNAUTHENTICATED, 0, 0, bytes(32)))
            raise TransportError("a client did not prove that it has the cluster secret and means this incarnation")
        sizes = self._pool.page_bytes, self._pool.num_blocks
        proof = wire.server_mac(key, nonce, client_nonce, incarnation, repr(sizes).encode())
        connection.sendall(wire.WELCOME.pack(wire.Status.OK, *sizes, proof))

    def _answer(self, connection: socket.socket, peer: PeerCertificate | None) -> None:
        """Serve one request; raises if the connection has ended, or if the client's certificate has."""
        (length,) = wire.REQUEST_LENGTH.unpack(wire.receive(connection, wire.REQUEST_LENGTH.size, _no_tick))
        unit_bytes: int | None = self._pool.page_bytes
        if length & wire.PIECES:
            unit_bytes, length = self._pool.piece_bytes, length & ~wire.PIECES
        try:
            wire.check_request_length(length)
        except TransportError as error:
            self._refuse(connection, 0, str(error))
            raise
        request_id, runs = wire.unpack_request(wire.receive(connection, length, _no_tick))
        if peer is not None and not peer.is_accepted():
            self._refuse(connection, request_id, _WITHDRAWN)
            raise IncompatiblePeerError(_WITHDRAWN)
        reason = self._why_not(runs, unit_bytes)
        if reason is not None:
            self._refuse(connection, request_id, reason)
            return
        assert unit_bytes is not None
        views = [self._bytes.blocks(first, count, unit_bytes) for first, count in runs]
        header = wire.ANSWER.pack(request_id, wire.Status.OK, sum(map(len, views)))
        wire.send_all(connection, [memoryview(header), *views])

    def _why_not(self, runs: list[tuple[int, int]], unit_bytes: int | None) -> str | None:
        if unit_bytes is None:
            return "this pool is read as whole pages only, and pieces of them were asked for"
        held = self._pool.held_bytes
        start, last = max(NULL_BLOCK + 1, held.start // unit_bytes), held.stop // unit_bytes - 1
        for first, count in runs:
            if first < start or count < 1 or first + count - 1 > last:
                return f"{count} blocks from block {first} on are outside this pool's blocks {start} to {last}"
        total = sum(count for _, count in runs)
        return None if total <= last else f"{total} blocks are more than the {last} of this pool"

    def _refuse(self, connection: socket.socket, request_id: int, reason: str) -> None:
        words = reason.encode()[: wire.MAX_REFUSAL_BYTES]
        connection.sendall(wire.ANSWER.pack(request_id, wire.Status.REFUSED, len(words)) + words)


def _check_time(limit_s: float) -> None:
    if time.monotonic() > limit_s:
        raise TransportError("the handshake took too long")


def _no_tick() -> None:
    """Idle connections have no time limit."""


def _shutdown(connection: socket.socket) -> None:
    """Shut a connection down, which wakes the threads waiting on it; ignores one that is closed already."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
