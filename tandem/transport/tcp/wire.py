"""Format of the TCP protocol's messages: handshake, request and answer, each of bounded size and checked before use.

    server → client  HELLO    magic, version, server nonce, server incarnation
    client → server  AUTH     magic, version, client nonce, expected incarnation, MAC of the client's side
    server → client  WELCOME  status, page_bytes, num_blocks, MAC of the server's side
    then, any number of times:
    client → server  REQUEST  length, request id, runs of (first block, count); the highest bit of the length says
                              that they count in pieces of pages, as the card states them
    server → client  ANSWER   request id, status, number of bytes that follow (blocks, or a refusal's message)

Both MACs cover both nonces and both sides' purpose, so neither can be replayed or reflected. All of it goes over TLS
where workers have certificates; where they have none, the blocks are plain on the wire.
"""

import hmac
import socket
import struct
from collections.abc import Callable, Sequence
from enum import IntEnum

from tandem.core.errors import TransportError
from tandem.tls.socket import EncryptedSocket

PROTOCOL_VERSION = 1
MAGIC = b"TKVT"
NONCE_BYTES = 32
MAX_REQUEST_RUNS = 1 << 17  # of one read
MAX_REFUSAL_BYTES = 1024  # of the message
PIECES = 1 << 31  # in a request's length
MAX_BUFFERS = 1024  # one system call's worth; Linux's IOV_MAX

HELLO = struct.Struct("!4sH32s16s")
AUTH = struct.Struct("!4sH32s16s32s")
WELCOME = struct.Struct("!BQQ32s")
REQUEST_LENGTH = struct.Struct("!I")
REQUEST_HEADER = struct.Struct("!Q")
RUN = struct.Struct("!II")
ANSWER = struct.Struct("!QBQ")


class Status(IntEnum):
    """Result of a message, reported by the server."""

    OK = 0
    REFUSED = 1
    UNAUTHENTICATED = 2


Tick = Callable[[], None]


def set_timeouts(connection: socket.socket, *, receive_s: float = 0.0, send_s: float = 0.0) -> None:
    """Set the kernel's timeouts of one call, 0 = none. The socket stays blocking for Python, so that one call moves as
    much as it can instead of one buffer.
    """
    if isinstance(connection, EncryptedSocket):
        connection.wait_at_most(receive_s=receive_s, send_s=send_s)
        return
    connection.settimeout(None)
    for option, seconds in ((socket.SO_RCVTIMEO, receive_s), (socket.SO_SNDTIMEO, send_s)):
        microseconds = round(seconds * 1e6)
        value = struct.pack("ll", microseconds // 1_000_000, microseconds % 1_000_000)
        connection.setsockopt(socket.SOL_SOCKET, option, value)


def tune(connection: socket.socket) -> None:
    """Configure a socket to send small messages at once and to detect a peer host that has vanished."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def receive_into(connection: socket.socket, views: Sequence[memoryview], tick: Tick) -> None:
    """Fill every view, in order. `tick` is called at every timeout of the kernel; it raises to give up.

    Raises:
        TransportError: the other side closed the connection.
        OSError: it broke.
    """
    for start in range(0, len(views), MAX_BUFFERS):
        pending = list(views[start : start + MAX_BUFFERS])
        while pending:
            try:
                num_bytes = _fill(connection, pending)
            except BlockingIOError:
                tick()
                continue
            if num_bytes == 0:
                raise TransportError("the peer closed the connection")
            pending = _advance(pending, num_bytes)
            if pending:
                tick()


def _fill(connection: socket.socket, views: Sequence[memoryview]) -> int:
    """Receive until all views are full or the kernel's timeout; returns the number of bytes."""
    if isinstance(connection, EncryptedSocket):
        return connection.fill(views)
    num_bytes, *_ = connection.recvmsg_into(views, 0, socket.MSG_WAITALL)
    return num_bytes


def send_all(connection: socket.socket, views: Sequence[memoryview]) -> None:
    """Send every view, in order.

    Raises:
        OSError: the connection broke, or `set_timeouts` ran out without one byte taken.
    """
    if isinstance(connection, EncryptedSocket):
        for view in views:
            connection.sendall(view)
        return
    for start in range(0, len(views), MAX_BUFFERS):
        pending = list(views[start : start + MAX_BUFFERS])
        while pending:
            pending = _advance(pending, connection.sendmsg(pending))


def _advance(views: list[memoryview], num_bytes: int) -> list[memoryview]:
    """Returns the views without their first `num_bytes` bytes."""
    for index, view in enumerate(views):
        if num_bytes < len(view):
            return [view[num_bytes:], *views[index + 1 :]]
        num_bytes -= len(view)
    return []


def receive(connection: socket.socket, num_bytes: int, tick: Tick) -> bytes:
    """Receives exactly `num_bytes`. Raises `TransportError` if the other side closed, OSError if the link broke."""
    buffer = bytearray(num_bytes)
    if num_bytes:
        receive_into(connection, [memoryview(buffer)], tick)
    return bytes(buffer)


def client_mac(key: bytes, server_nonce: bytes, client_nonce: bytes, incarnation: bytes) -> bytes:
    """MAC that proves to the server that the client has the secret and addresses this incarnation."""
    return hmac.digest(key, b"client" + server_nonce + client_nonce + incarnation, "sha256")


def server_mac(key: bytes, server_nonce: bytes, client_nonce: bytes, incarnation: bytes, pool: bytes) -> bytes:
    """MAC that proves to the client that the server has the secret and the pool it describes."""
    return hmac.digest(key, b"server" + server_nonce + client_nonce + incarnation + pool, "sha256")


def pack_request(request_id: int, runs: Sequence[tuple[int, int]], *, in_pieces: bool = False) -> bytes:
    """The REQUEST message for `runs` of (first block, count), its length included."""
    body = REQUEST_HEADER.pack(request_id) + b"".join(RUN.pack(first, count) for first, count in runs)
    return REQUEST_LENGTH.pack(len(body) | (PIECES if in_pieces else 0)) + body


def check_request_length(length: int) -> None:
    """Raises `TransportError` unless `length` is that of a request with an acceptable number of runs."""
    num_runs, rest = divmod(length - REQUEST_HEADER.size, RUN.size)
    if rest or not 1 <= num_runs <= MAX_REQUEST_RUNS:
        raise TransportError(f"a request of {length} bytes has no whole number of runs from 1 to {MAX_REQUEST_RUNS}")


def unpack_request(body: bytes) -> tuple[int, list[tuple[int, int]]]:
    """(request id, runs of (first block, count)) of a body whose length was checked."""
    (request_id,) = REQUEST_HEADER.unpack_from(body)
    return request_id, list(RUN.iter_unpack(body[REQUEST_HEADER.size :]))
