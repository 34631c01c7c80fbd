"""Peers that lie, stall or break off: the read fails, in time, and nothing is written afterwards."""

import socket
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from tandem.core.errors import ConfigurationError, IncompatiblePeerError, TransportError
from tandem.transport.card import Identity
from tandem.transport.tcp import wire
from tandem.transport.tcp.transport import TcpConfig, TcpTransport
from tandem.transport.transfer import Transfer, TransferState
from tests.helpers.secret import SECRET
from tests.helpers.transport_pools import COMPATIBILITY, Pages, pool_of, seeded_pages, wait_over
from tests.helpers.transport_scripts import scripted_peer, shake_hands, take_request, wait_for_close

POOL = pool_of(seeded_pages(1, 16, 256))
THEM = Identity(COMPATIBILITY, SECRET)
NONCE = bytes(wire.NONCE_BYTES)
INCARNATION = bytes.fromhex(THEM.incarnation)
HELLO = wire.HELLO.pack(wire.MAGIC, wire.PROTOCOL_VERSION, NONCE, INCARNATION)
WAIT_S = 10.0


@pytest.fixture
def pages() -> Pages:
    return seeded_pages(2, 16, 256)


@pytest.fixture
def reader(pages: Pages) -> Iterator[TcpTransport]:
    transport = TcpTransport(pool_of(pages), Identity(COMPATIBILITY, SECRET))
    yield transport
    transport.close()


def say(*messages: bytes) -> Callable[[socket.socket], None]:
    def script(connection: socket.socket) -> None:
        for message in messages:
            connection.sendall(message)

    return script


@pytest.mark.parametrize(
    ("hello", "error", "words"),
    [
        (b"", TransportError, "closed the connection"),
        (HELLO[:20], TransportError, "closed the connection"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n" * 4, IncompatiblePeerError, "speaks b'HTTP'"),
        (wire.HELLO.pack(wire.MAGIC, 9, NONCE, INCARNATION), IncompatiblePeerError, "version 9; .* version 1"),
        (wire.HELLO.pack(wire.MAGIC, 1, NONCE, bytes(16)), IncompatiblePeerError, f"{'0' * 32}, .* {THEM.incarnation}"),
        (HELLO + bytes(wire.WELCOME.size), IncompatiblePeerError, "do not share a cluster secret"),
        (HELLO + b"\x02" + bytes(wire.WELCOME.size - 1), IncompatiblePeerError, "do not share a cluster secret"),
    ],
    ids=["nothing", "half", "http", "version", "incarnation", "no proof", "refusal"],
)
def test_a_peer_that_does_not_shake_hands(
    hello: bytes, error: type[Exception], words: str, reader: TcpTransport
) -> None:
    with scripted_peer(THEM, POOL, say(hello)) as card, pytest.raises(error, match=words):
        reader.connect(card)


def test_a_peer_without_the_secret(reader: TcpTransport) -> None:
    """It has a card made by one who knows the secret, and the address, but not the secret."""
    impostor = Identity(COMPATIBILITY, secret=b"something else..", incarnation=THEM.incarnation)
    script = lambda connection: shake_hands(connection, impostor, POOL)  # noqa: E731
    with scripted_peer(THEM, POOL, script) as card, pytest.raises(IncompatiblePeerError, match="cluster secret"):
        reader.connect(card)


def test_a_pool_other_than_the_cards(reader: TcpTransport) -> None:
    other = pool_of(seeded_pages(1, 17, 256))
    script = lambda connection: shake_hands(connection, THEM, other)  # noqa: E731
    with scripted_peer(THEM, POOL, script) as card, pytest.raises(IncompatiblePeerError, match=r"17 .* says 16"):
        reader.connect(card)


def test_nobody_listens(reader: TcpTransport) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    gone = TcpTransport(POOL, Identity(COMPATIBILITY, SECRET), TcpConfig(port=port))
    card = gone.card()
    gone.close()
    with pytest.raises(TransportError, match=f"cannot reach peer .* at 127.0.0.1:{port}"):
        reader.connect(card)


def failed_read(reader: TcpTransport, card: bytes, deadline_s: float | None = None) -> Transfer:
    transfer = reader.read(reader.connect(card), [3, 4, 9], [5, 6, 7], deadline_s)
    assert wait_over(transfer, WAIT_S)
    assert transfer.state is TransferState.FAILED
    return transfer


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"", "closed the connection"),
        (b"\xff" * 200, "does not follow the protocol"),
        (wire.ANSWER.pack(7, wire.Status.OK, 768), "does not follow the protocol"),
        (wire.ANSWER.pack(1, wire.Status.OK, 769), "does not follow the protocol"),
        (wire.ANSWER.pack(1, wire.Status.OK, 2**63), "does not follow the protocol"),
        (wire.ANSWER.pack(1, wire.Status.REFUSED, 2**40), "does not follow the protocol"),
        (wire.ANSWER.pack(1, wire.Status.REFUSED, 9) + b"not today", "refused a read: not today"),
    ],
    ids=["nothing", "garbage", "other request", "more bytes", "absurd bytes", "endless refusal", "refusal"],
)
def test_a_peer_that_answers_wrongly(answer: bytes, words: str, reader: TcpTransport, pages: Pages) -> None:
    def script(connection: socket.socket) -> None:
        shake_hands(connection, THEM, POOL)
        take_request(connection)
        connection.sendall(answer)

    before = pages.copy()
    with scripted_peer(THEM, POOL, script) as card:
        assert words in str(failed_read(reader, card).error)
    assert np.array_equal(pages, before)


def test_a_peer_that_breaks_off_in_the_middle(reader: TcpTransport, pages: Pages) -> None:
    def script(connection: socket.socket) -> None:
        shake_hands(connection, THEM, POOL)
        request_id, runs = take_request(connection)
        assert runs == [(3, 2), (9, 1)]
        connection.sendall(wire.ANSWER.pack(request_id, wire.Status.OK, 768) + b"\x11" * 300)

    before = pages.copy()
    with scripted_peer(THEM, POOL, script) as card:
        assert "closed the connection" in str(failed_read(reader, card).error)
    assert np.array_equal(np.delete(pages, [5, 6, 7], axis=0), np.delete(before, [5, 6, 7], axis=0))


def test_a_peer_that_stalls_in_the_middle(reader: TcpTransport, pages: Pages) -> None:
    """Its deadline fails the read and closes the connection: what the peer sends later goes nowhere."""

    def script(connection: socket.socket) -> None:
        shake_hands(connection, THEM, POOL)
        request_id, _ = take_request(connection)
        connection.sendall(wire.ANSWER.pack(request_id, wire.Status.OK, 768) + b"\x11" * 300)
        wait_for_close(connection)

    with scripted_peer(THEM, POOL, script) as card:
        transfer = failed_read(reader, card, deadline_s=0.3)
    assert "deadline" in str(transfer.error)
    assert transfer.finished_s is not None
    assert 0.3 <= transfer.finished_s - transfer.started_s < 1.5


def test_reads_behind_a_stalled_one_keep_their_own_deadlines(reader: TcpTransport) -> None:
    def script(connection: socket.socket) -> None:
        shake_hands(connection, THEM, POOL)
        wait_for_close(connection)

    with scripted_peer(THEM, POOL, script) as card:
        peer = reader.connect(card)
        stalled = reader.read(peer, [1], [1], deadline_s=30.0)
        behind = reader.read(peer, [2], [2], deadline_s=0.2)
        assert behind.wait(WAIT_S)
        assert "behind others" in str(behind.error)
        assert stalled.state is TransferState.PENDING
        reader.disconnect(peer)
        assert stalled.is_over
        assert "disconnected" in str(stalled.error)


def test_a_broken_connection_is_made_again_for_the_next_read(pages: Pages) -> None:
    source_pages = seeded_pages(3, 16, 256)
    source = TcpTransport(pool_of(source_pages), Identity(COMPATIBILITY, SECRET))
    reader = TcpTransport(pool_of(pages), Identity(COMPATIBILITY, SECRET), TcpConfig(num_streams=3))
    peer = reader.connect(source.card())
    late = reader.read(peer, [1], [1], deadline_s=-1.0)
    assert late.wait(WAIT_S)
    transfers = [reader.read(peer, [block], [block]) for block in range(1, 16)]
    assert all(transfer.wait(WAIT_S) for transfer in transfers)
    assert np.array_equal(pages[1:], source_pages[1:])
    reader.close()
    source.close()


@pytest.mark.parametrize("num_started", [0, 1])
def test_a_reader_without_threads_is_told_so(num_started: int, pages: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a worker that ran out of threads while it met a peer ended."""
    source = TcpTransport(pool_of(seeded_pages(3, 16, 256)), Identity(COMPATIBILITY, SECRET))
    reader = TcpTransport(pool_of(pages), Identity(COMPATIBILITY, SECRET), TcpConfig(num_streams=2))
    start, started = threading.Thread.start, list[threading.Thread]()

    def start_some(thread: threading.Thread) -> None:
        if thread.name == "kv-tcp-read":
            if len(started) == num_started:
                raise RuntimeError("can't start new thread")
            started.append(thread)
        start(thread)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start_some)
        with pytest.raises(TransportError, match="can't start new thread"):
            reader.connect(source.card())
    assert not any(thread.is_alive() for thread in started)
    assert len(started) == num_started
    transfer = reader.read(reader.connect(source.card()), [1], [1])
    assert transfer.wait(WAIT_S)
    reader.close()
    source.close()


@pytest.mark.parametrize("bind_host", ["0.0.0.0", "::", ""])
def test_a_wildcard_is_no_address_for_peers(bind_host: str) -> None:
    with pytest.raises(ConfigurationError, match="set advertise_host"):
        TcpConfig(bind_host=bind_host)
    assert TcpConfig(bind_host=bind_host, advertise_host="10.0.0.1").advertise_host == "10.0.0.1"


def test_an_address_in_use_is_a_matter_of_configuration() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"cannot listen on 127.0.0.1:{port}"):
            TcpTransport(POOL, Identity(COMPATIBILITY, SECRET), TcpConfig(port=port))


def test_a_gpu_pool_is_refused() -> None:
    pool = pool_of(seeded_pages(1, 2, 64))
    gpu = type(pool)(pool.address, pool.page_bytes, pool.num_blocks, "cuda:0", None)
    with pytest.raises(ConfigurationError, match="cuda:0"):
        TcpTransport(gpu, Identity(COMPATIBILITY, SECRET))
