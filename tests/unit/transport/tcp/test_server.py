"""Clients that lie: a pool's server shows bytes of the pool to those with the secret, and nothing else to anybody."""

import secrets
import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from tandem.core.errors import TransportError
from tandem.transport.card import Identity, unseal
from tandem.transport.tcp import wire
from tandem.transport.tcp.client import Address, open_connection
from tandem.transport.tcp.transport import TcpTransport
from tests.helpers.secret import SECRET
from tests.helpers.transport_pools import COMPATIBILITY, Pages, pool_of, seeded_pages
from tests.helpers.transport_scripts import no_tick

IDENTITY = Identity(COMPATIBILITY, SECRET)
NUM_BLOCKS, PAGE_BYTES = 16, 256


@pytest.fixture(scope="module")
def pages() -> Pages:
    return seeded_pages(4, NUM_BLOCKS, PAGE_BYTES)


@pytest.fixture(scope="module")
def server(pages: Pages) -> Iterator[TcpTransport]:
    transport = TcpTransport(pool_of(pages), IDENTITY)
    yield transport
    transport.close()


@pytest.fixture
def stranger(server: TcpTransport) -> Iterator[socket.socket]:
    """A connection that has not shaken hands."""
    with socket.create_connection((server.address.host, server.address.port), timeout=10) as connection:
        yield connection


@pytest.fixture
def client(server: TcpTransport) -> Iterator[socket.socket]:
    """A connection that has."""
    address = Address(server.address.host, server.address.port)
    reader = Identity(COMPATIBILITY, SECRET)
    with open_connection(address, unseal(server.card(), reader), reader, no_tick) as connection:
        connection.settimeout(10)
        yield connection


def test_a_server_without_threads_for_a_connection_serves_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """It accepted no more, for good: the thread that accepts had ended."""
    start, refused = threading.Thread.start, list[threading.Thread]()

    def start_but_the_first(thread: threading.Thread) -> None:
        if thread.name == "kv-tcp-serve" and not refused:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_but_the_first)
    transport = TcpTransport(pool_of(seeded_pages(4, NUM_BLOCKS, PAGE_BYTES)), IDENTITY)
    try:
        where = transport.address.host, transport.address.port
        with socket.create_connection(where, timeout=10) as connection:
            assert is_closed(connection)
        reader = Identity(COMPATIBILITY, SECRET)
        open_connection(Address(*where), unseal(transport.card(), reader), reader, no_tick).close()
    finally:
        transport.close()
    assert len(refused) == 1


@pytest.mark.parametrize("host", ["a" * 64, "a..b"])
def test_a_name_that_is_none_is_not_reached(host: str, server: TcpTransport) -> None:
    """Every worker that met one of such a name ended: of several hosts, one whose `--advertise-host` was mistyped."""
    reader = Identity(COMPATIBILITY, SECRET)
    with pytest.raises(TransportError, match="cannot reach peer"):
        open_connection(Address(host, 1), unseal(server.card(), reader), reader, no_tick)


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def ask(client: socket.socket, *runs: tuple[int, int], in_pieces: bool = False) -> tuple[int, bytes]:
    """(status, what followed)."""
    client.sendall(wire.pack_request(5, runs, in_pieces=in_pieces))
    request_id, status, num_bytes = wire.ANSWER.unpack(wire.receive(client, wire.ANSWER.size, no_tick))
    assert request_id == 5
    return status, wire.receive(client, num_bytes, no_tick)


def test_runs_come_in_the_order_asked(client: socket.socket, pages: Pages) -> None:
    status, given = ask(client, (9, 2), (1, 1), (15, 1))
    assert status == wire.Status.OK
    assert given == pages[[9, 10, 1, 15]].tobytes()


@pytest.mark.parametrize("run", [(0, 1), (16, 1), (15, 2), (1, 16), (1, 0), (2**32 - 1, 2), (1, 2**32 - 1), (8, 9)])
def test_runs_outside_the_pool_are_refused_and_the_connection_lives(
    run: tuple[int, int], client: socket.socket, pages: Pages
) -> None:
    status, reason = ask(client, (1, 1), run)
    assert status == wire.Status.REFUSED
    assert f"{run[1]} blocks from block {run[0]} on are outside".encode() in reason
    assert ask(client, (2, 1)) == (wire.Status.OK, pages[2].tobytes())


def test_pieces_of_a_pool_without_any_are_refused_and_the_connection_lives(client: socket.socket, pages: Pages) -> None:
    """Regression: whole pages came in their place."""
    status, reason = ask(client, (1, 1), in_pieces=True)
    assert (status, reason) == (
        wire.Status.REFUSED,
        b"this pool is read as whole pages only, and pieces of them were asked for",
    )
    assert ask(client, (2, 1)) == (wire.Status.OK, pages[2].tobytes())


def test_more_blocks_than_the_pool_has_are_refused(client: socket.socket) -> None:
    status, reason = ask(client, (1, 15), (1, 1))
    assert status == wire.Status.REFUSED
    assert b"16 blocks are more than the 15" in reason


@pytest.mark.parametrize("length", [0, 8, 15, 17, 2**20 + 17, 2**32 - 1])
def test_requests_of_impossible_length_end_the_connection(length: int, client: socket.socket) -> None:
    client.sendall(struct.pack("!I", length))
    _, status, _ = wire.ANSWER.unpack(wire.receive(client, wire.ANSWER.size, no_tick))
    assert status == wire.Status.REFUSED
    while client.recv(4096):
        pass


@pytest.mark.parametrize(
    "garbage", [b"GET / HTTP/1.1\r\n\r\n" * 10, bytes(200), b"\xff" * 86], ids=["http", "zeros", "ones"]
)
def test_garbage_instead_of_a_handshake_gets_no_byte_of_the_pool(garbage: bytes, stranger: socket.socket) -> None:
    stranger.sendall(garbage)
    hello = wire.receive(stranger, wire.HELLO.size, no_tick)
    assert hello.startswith(wire.MAGIC)
    assert stranger.recv(4096)[:1] == bytes([wire.Status.UNAUTHENTICATED])
    assert is_closed(stranger)


@pytest.mark.parametrize(
    ("key_of", "incarnation"),
    [(Identity({}, secret=b"not the secret!!"), IDENTITY.incarnation), (IDENTITY, "ab" * 16)],
    ids=["secret", "incarnation"],
)
def test_a_wrong_secret_or_incarnation_gets_no_byte_of_the_pool(
    key_of: Identity, incarnation: str, stranger: socket.socket
) -> None:
    _, _, nonce, _ = wire.HELLO.unpack(wire.receive(stranger, wire.HELLO.size, no_tick))
    own, expected = secrets.token_bytes(wire.NONCE_BYTES), bytes.fromhex(incarnation)
    proof = wire.client_mac(key_of.key("tcp"), nonce, own, expected)
    stranger.sendall(wire.AUTH.pack(wire.MAGIC, wire.PROTOCOL_VERSION, own, expected, proof))
    status, *_ = wire.WELCOME.unpack(wire.receive(stranger, wire.WELCOME.size, no_tick))
    assert status == wire.Status.UNAUTHENTICATED
    assert is_closed(stranger)


def test_a_recorded_handshake_does_not_work_again(server: TcpTransport) -> None:
    """The server's nonce is new for every connection."""
    address = (server.address.host, server.address.port)
    incarnation = bytes.fromhex(IDENTITY.incarnation)
    recorded = b""
    statuses = []
    for _ in range(2):
        with socket.create_connection(address, timeout=10) as connection:
            _, _, nonce, _ = wire.HELLO.unpack(wire.receive(connection, wire.HELLO.size, no_tick))
            if not recorded:
                proof = wire.client_mac(IDENTITY.key("tcp"), nonce, bytes(32), incarnation)
                recorded = wire.AUTH.pack(wire.MAGIC, wire.PROTOCOL_VERSION, bytes(32), incarnation, proof)
            connection.sendall(recorded)
            status, *_ = wire.WELCOME.unpack(wire.receive(connection, wire.WELCOME.size, no_tick))
            statuses.append(status)
    assert statuses == [wire.Status.OK, wire.Status.UNAUTHENTICATED]


def test_a_silent_client_is_dropped(stranger: socket.socket) -> None:
    wire.receive(stranger, wire.HELLO.size, no_tick)
    assert is_closed(stranger)
