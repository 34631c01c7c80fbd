"""A TCP peer that misbehaves as told: it shakes hands as the protocol wants, or does not, and then follows a script."""

import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tandem.transport.base import MemoryPool
from tandem.transport.card import Identity, describe, seal
from tandem.transport.tcp import wire

Script = Callable[[socket.socket], None]


def no_tick() -> None:
    """For reads that wait as long as it takes."""


@contextmanager
def scripted_peer(identity: Identity, pool: MemoryPool, script: Script) -> Iterator[bytes]:
    """The card of a peer whose first connection runs `script`; the connection closes when the script returns, and
    leaving the context waits for that.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{listener.getsockname()[1]}"

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            script(connection)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield seal(describe("tcp", identity, pool, address.encode()), identity)
    finally:
        thread.join()
        listener.close()


def shake_hands(connection: socket.socket, identity: Identity, pool: MemoryPool) -> None:
    """The server's side of a correct handshake."""
    nonce, incarnation = secrets.token_bytes(wire.NONCE_BYTES), bytes.fromhex(identity.incarnation)
    connection.sendall(wire.HELLO.pack(wire.MAGIC, wire.PROTOCOL_VERSION, nonce, incarnation))
    given = wire.AUTH.unpack(wire.receive(connection, wire.AUTH.size, no_tick))
    sizes = pool.page_bytes, pool.num_blocks
    proof = wire.server_mac(identity.key("tcp"), nonce, given[2], incarnation, repr(sizes).encode())
    connection.sendall(wire.WELCOME.pack(wire.Status.OK, *sizes, proof))


def take_request(connection: socket.socket) -> tuple[int, list[tuple[int, int]]]:
    """(request id, runs) of the next request."""
    (length,) = wire.REQUEST_LENGTH.unpack(wire.receive(connection, wire.REQUEST_LENGTH.size, no_tick))
    return wire.unpack_request(wire.receive(connection, length, no_tick))


def wait_for_close(connection: socket.socket) -> None:
    """Stall until the other side leaves."""
    while connection.recv(4096):
        pass
