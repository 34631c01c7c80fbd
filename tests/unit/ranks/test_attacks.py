"""Hosts of a group as an attacker would be one: without the secret, with a recording, and with the secret but lies."""

import os
import random
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress

import pytest

from tandem.compute.native.exchange import BUFFER_BYTES, make_memory
from tandem.compute.native.links import SharedLinks
from tandem.compute.native.links_layout import make_links_memory
from tandem.core.config import EngineConfig
from tandem.core.errors import ConfigurationError, RanksLostError, TransportError
from tandem.engine.ranks import ShardSizes
from tandem.ranks import rendezvous
from tandem.ranks.epoch import Epoch
from tandem.ranks.frames import HEADER, MAX_MESSAGE_BYTES, NUMBER, PLACE, Frame, FrameKind
from tandem.ranks.host import HostSession
from tandem.ranks.host_group import HostGroup
from tandem.ranks.host_kv import KVEndpoint
from tandem.ranks.link import Link
from tandem.ranks.messages import Begin, Loaded, Prepared, ToLeader, pack, unpack
from tandem.ranks.remote import RemoteRank
from tandem.ranks.rendezvous import ANSWER, HELLO, JOIN, Direction, join
from tandem.transport.tcp import wire
from tests.helpers.native_kernels import load_or_skip
from tests.helpers.rank_hosts import proof
from tests.helpers.secret import SECRET

RELEASE = "of the test"
LOCAL = "127.0.0.1"


@pytest.fixture(autouse=True, scope="module")
def _compiled() -> None:
    load_or_skip()


@contextmanager
def leader(num_hosts: int = 2) -> Iterator[HostGroup]:
    hosts = HostGroup((LOCAL, 0), proof(), num_hosts, num_hosts, release=RELEASE)
    try:
        yield hosts
    finally:
        hosts.close()


def until_closed(connection: socket.socket) -> bytes:
    received = b""
    with suppress(ConnectionResetError):
        while data := connection.recv(1 << 12):
            received += data
    return received


@contextmanager
def recorded(port: int) -> Iterator[tuple[int, bytearray]]:
    """A port that leads to the leader's, and what hosts have sent to it."""
    sent = bytearray()

    def pass_on(source: socket.socket, target: socket.socket, record: bytearray | None) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 12):
                if record is not None:
                    record += data
                target.sendall(data)

    with socket.create_server((LOCAL, 0)) as listener, ExitStack() as opened:

        def serve() -> None:
            client = opened.enter_context(listener.accept()[0])
            server = opened.enter_context(socket.create_connection((LOCAL, port)))
            threading.Thread(target=pass_on, args=(client, server, sent), daemon=True).start()
            threading.Thread(target=pass_on, args=(server, client, None), daemon=True).start()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1], sent
        thread.join()


def test_a_recorded_handshake_counts_once() -> None:
    """Its proof covers the leader's nonce, which is another one for each connection."""
    with leader() as hosts:
        with recorded(hosts.port) as (port, sent):
            join((LOCAL, port), proof(), bytes(16), Direction.TO_HOST, RELEASE)[0].close()
        with socket.create_connection((LOCAL, hosts.port), timeout=10) as replay:
            replay.sendall(sent)
            received = until_closed(replay)
    assert received[HELLO.size :] == ANSWER.pack(1, 0, bytes(32)), "refused, and nothing is proved in return"


def fake_leader(answer: bytes | None) -> tuple[socket.socket, threading.Thread]:
    """Says HELLO, then `answer`, or None = the host's own proof as if it were the leader's."""
    listener = socket.create_server((LOCAL, 0))

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(HELLO.pack(rendezvous.MAGIC, rendezvous.PROTOCOL_VERSION, bytes(32)))
            told = connection.recv(JOIN.size, socket.MSG_WAITALL)
            mac = JOIN.unpack(told)[-1]
            connection.sendall(ANSWER.pack(0, 0, mac) if answer is None else answer)
            until_closed(connection)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return listener, thread


@pytest.mark.parametrize("answer", [None, ANSWER.pack(0, 0, bytes(32)), ANSWER.pack(1, 5, bytes(32)) + b"leave"])
def test_a_host_follows_no_leader_without_the_secret(answer: bytes | None) -> None:
    """Nor does it believe a refusal, or its own proof reflected."""
    listener, thread = fake_leader(answer)
    with listener, pytest.raises(ConfigurationError, match="do not share a cluster secret"):
        join((LOCAL, listener.getsockname()[1]), proof(), bytes(16), Direction.TO_HOST, RELEASE)
    thread.join()


def test_a_stranger_who_says_a_byte_now_and_then_is_left_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "HANDSHAKE_S", 0.5)
    with leader() as hosts, socket.create_connection((LOCAL, hosts.port), timeout=10) as slow:
        began_s = time.monotonic()
        with suppress(ConnectionError):
            while time.monotonic() - began_s < 8:
                slow.sendall(b"T")
                slow.settimeout(0.05)
                with suppress(TimeoutError):
                    if not slow.recv(1 << 12):
                        break
        assert time.monotonic() - began_s < 5, "at that pace its proof would take as long as it likes"


def test_strangers_fill_neither_the_log_nor_the_leader(caplog: pytest.LogCaptureFixture) -> None:
    """A host joins beside them; what they say is logged once, and nothing that is secret."""
    with leader() as hosts:
        for number in range(20):
            with socket.create_connection((LOCAL, hosts.port), timeout=10) as stranger:
                stranger.sendall(random.Random(number).randbytes(JOIN.size + 1000))
                until_closed(stranger)
        ways = [join((LOCAL, hosts.port), proof(), bytes(16), way, RELEASE)[0] for way in Direction]
        hosts.wait(20)
        for way in ways:
            way.close()
    complaints = [record for record in caplog.records if "a host could not join" in record.message]
    assert len([record for record in complaints if record.levelname == "WARNING"]) <= 3, "one a class of errors"
    assert SECRET.decode() not in caplog.text
    assert proof().key.hex() not in caplog.text
    assert SECRET.decode() not in repr(proof())
    assert repr(proof().key) not in repr(proof())


def raw_join(port: int, direction: int, words: bytes) -> bytes:
    """Answer of the leader to a host that has the secret and sends these words."""
    with socket.create_connection((LOCAL, port), timeout=10) as connection:
        _, _, nonce = HELLO.unpack(connection.recv(HELLO.size, socket.MSG_WAITALL))
        own, host_id = bytes(32), bytes(16)
        mac = proof().mac(b"host", nonce, own, host_id, bytes([direction]), words)
        head = JOIN.pack(rendezvous.MAGIC, rendezvous.PROTOCOL_VERSION, own, host_id, direction, len(words), mac)
        connection.sendall(head + words)
        return until_closed(connection)


def test_a_host_of_no_direction_and_a_release_of_control_characters_are_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with leader() as hosts:
        assert b"direction=7 is none" in raw_join(hosts.port, 7, RELEASE.encode())
        assert b"\\n" in raw_join(hosts.port, 0, b"x\n2026-11-27 root logged in")
    assert "\n2026-11-27 root" not in caplog.text, "who has a say in the log writes no lines of its own"


class LyingHost:
    """A host that has the secret, and says over its link what it likes."""

    def __init__(self, port: int) -> None:
        where = LOCAL, port
        self.from_leader, self.to_leader = (join(where, proof(), bytes(16), way, RELEASE)[0] for way in Direction)
        for connection in (self.from_leader, self.to_leader):
            wire.set_timeouts(connection, receive_s=20.0, send_s=20.0)
        assert self.next().kind == FrameKind.PLACE

    def next(self) -> Frame:
        """Next frame from the leader, apart from heartbeats."""
        while True:
            frame = Frame.unpack(self.from_leader.recv(HEADER.size, socket.MSG_WAITALL))
            if frame.size:
                self.said = self.from_leader.recv(frame.size, socket.MSG_WAITALL)
            if frame.kind != FrameKind.BEATS:
                return frame

    def say(self, frame: Frame, payload: bytes = b"") -> None:
        self.to_leader.sendall(frame.pack() + payload)

    def close(self) -> None:
        self.from_leader.close()
        self.to_leader.close()


class Leading:
    """A leader with one lying host, whose rank 1 has begun unless it `says` otherwise."""

    def __init__(self, opened: ExitStack) -> None:
        self._opened = opened
        self.hosts = opened.enter_context(leader())
        self.host = LyingHost(self.hosts.port)
        opened.callback(self.host.close)
        self.hosts.wait(20)
        self._memory = make_memory(2)
        self._pool = opened.enter_context(ThreadPoolExecutor(1))
        opened.callback(self.hosts.close)
        self.beginning = self._pool.submit(self.hosts.begin, 1, self._memory)
        assert self.host.next().kind == FrameKind.BEGIN

    def begin(self) -> None:
        self.host.say(Frame(FrameKind.STARTED, epoch=1, size=NUMBER.size), NUMBER.pack(1234))
        rank = self.beginning.result(20)[1]
        assert isinstance(rank, RemoteRank)
        self._opened.callback(rank.close)
        self.rank = rank

    def why_lost(self) -> str:
        """Reason that the leader gives for the loss of the host."""
        with suppress(EOFError):
            while True:
                self.rank.receive()
        assert self.rank.wait(20)
        return self.rank.ending


@pytest.fixture
def leading() -> Iterator[Leading]:
    with ExitStack() as opened:
        yield Leading(opened)


def test_a_host_with_another_number_of_ranks_is_lost(leading: Leading) -> None:
    leading.host.say(Frame(FrameKind.STARTED, epoch=1, size=2 * NUMBER.size), NUMBER.pack(1) + NUMBER.pack(2))
    with pytest.raises(RanksLostError, match="it says STARTED with 16 bytes, for 1 ranks"):
        leading.beginning.result(20)


LIES = {
    "an oversize frame": (HEADER.pack(2, 1, 1, 0, MAX_MESSAGE_BYTES + 1), "is none of this protocol"),
    "an unknown kind": (HEADER.pack(99, 1, 1, 0, 0), "kind 99"),
    "a long message": (Frame(FrameKind.MESSAGE, 1, 1, size=1 << 20).pack(), "a message of 1048576 bytes"),
    "another's rank": (Frame(FrameKind.PUBLISH, 0, 1, 1, 8).pack(), "it speaks for rank 0"),
    "a lane that there is not": (Frame(FrameKind.PUBLISH, 3, 1, 1, 8).pack(), "there is no lane 3"),
    "another's message": (Frame(FrameKind.MESSAGE, 0, 1, size=1).pack() + b"x", "it speaks for rank 0"),
    "a later exchange": (Frame(FrameKind.PUBLISH, 1, 1, 2, 8).pack(), "as exchange 2, after 0"),
    "an exchange again": (2 * (Frame(FrameKind.PUBLISH, 1, 1, 1, 8).pack() + bytes(8)), "as exchange 1, after 1"),
    "a large exchange": (Frame(FrameKind.PUBLISH, 1, 1, 1, BUFFER_BYTES + 1).pack(), "as exchange 1, after 0"),
    "a leader's word": (Frame(FrameKind.KILL, 1, 1).pack(), "KILL, which is for leaders"),
    "beats of too many": (Frame(FrameKind.BEATS, epoch=1, size=24).pack() + bytes(24), "BEATS with 24 bytes"),
    "code": (
        Frame(FrameKind.MESSAGE, 1, 1, size=25).pack() + b"cos\nsystem\n(S'touch x'\ntR.",
        "no place in a message",
    ),
    "a forged log": (Frame(FrameKind.LOST, 1, 1, size=9).pack() + b"x\nroot: y", "words that cannot be shown"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_host_that_lies_is_lost_and_the_leader_says_why(leading: Leading, lie: str) -> None:
    said, why = LIES[lie]
    leading.begin()
    with suppress(OSError):
        leading.host.to_leader.sendall(said)
    lost = leading.why_lost()
    assert "with host 1 of 2 (127.0.0.1)" in lost
    assert re.search(why, lost)


def test_a_host_that_never_stops_talking_is_lost(leading: Leading) -> None:
    leading.begin()
    word = pack(Loaded("e", "f"))
    with suppress(OSError):
        for _ in range(20):
            leading.host.say(Frame(FrameKind.MESSAGE, 1, 1, size=len(word)), word)
    assert leading.rank.wait(20)
    assert "has said 16 messages that nobody waits for" in leading.rank.ending


class ToldRank(RemoteRank):
    """A rank that answers what it is told to, whatever it is asked."""

    def __init__(self, answer: Callable[[Begin], ToLeader]) -> None:
        self._answer = answer
        self._ours, self._theirs = socket.socketpair()

    def send(self, packed: bytes) -> None:
        message = unpack(packed)
        assert isinstance(message, Begin)
        self._said = self._answer(message)

    def receive(self) -> ToLeader:
        return self._said

    def wait(self, timeout_s: float | None) -> bool:
        return True

    def close(self) -> None:
        self._ours.close()
        self._theirs.close()


@pytest.mark.parametrize(
    ("answer", "refusal"),
    [
        (lambda begin: Loaded(begin.epoch, "f" * 64), f"another model than rank 0, {'f' * 16} and not {'a' * 16}"),
        (lambda begin: Loaded("former", "a" * 64), "Loaded where Loaded of this epoch was due"),
        (lambda begin: Prepared(begin.epoch), "Prepared where Loaded of this epoch was due"),
        (lambda begin: begin, "Begin where Loaded of this epoch was due"),
    ],
)
def test_a_host_with_other_weights_or_words_forms_no_group(answer: Callable[[Begin], ToLeader], refusal: str) -> None:
    memory = make_links_memory(2, 1)
    shared = SharedLinks(memory, 0, 2, 1, deadline_s=5.0)
    os.close(memory)
    epoch = Epoch(EngineConfig(model="none"), shared, {1: ToldRank(answer)}, 5.0, lambda: None)
    with pytest.raises(ConfigurationError, match=refusal):
        epoch.prepare("a" * 64, ShardSizes(1, 1, 1), keeps_pages=False)
    epoch.close()


def test_what_a_former_epoch_said_does_not_count(leading: Leading) -> None:
    """A frame that is late, or sent again, says nothing about the present ranks."""
    leading.begin()
    for kind in (FrameKind.LOST, FrameKind.MESSAGE, FrameKind.PUBLISH):
        leading.host.say(Frame(kind, 1, 0, 1, 5), b"again")
    leading.host.say(Frame(FrameKind.ENDED, 1, 0))
    leading.host.say(Frame(FrameKind.MESSAGE, 1, 1, size=len(word := pack(Loaded("e", "f")))), word)
    assert leading.rank.receive() == Loaded("e", "f")
    assert not leading.rank.wait(0.0)


def random_frame(draw: random.Random) -> bytes:
    """Of any kind but those that start processes; often with a payload of another size than it names."""
    kind = draw.choice([*(kind for kind in FrameKind if kind != FrameKind.BEGIN), draw.randrange(256)])
    size = draw.choice((0, 1, 3, 8, 16, 1 << 31, 1 << 32 - 1))
    size = min(size, (1 << 32) - 1)
    numbers = draw.randrange(4), draw.choice((0, 1, 1 << 31)), draw.choice((0, 1, 2, 1 << 62, (1 << 64) - 1)), size
    return HEADER.pack(int(kind), *numbers) + draw.randbytes(draw.choice((size if size < 100 else 0, 8)))


@pytest.mark.parametrize("seed", range(20))
def test_random_frames_end_a_host_with_an_error_of_ours(seed: int) -> None:
    (incoming, theirs), (outgoing, unread) = socket.socketpair(), socket.socketpair()
    draw = random.Random(seed)
    with incoming, theirs, outgoing, unread, ThreadPoolExecutor(1) as pool:
        running = pool.submit(HostSession(Link(incoming, outgoing, lambda: True), KVEndpoint(SECRET), lambda: None).run)
        theirs.sendall(Frame(FrameKind.PLACE, size=PLACE.size).pack() + PLACE.pack(1, 1, 2, 1, 1))
        with suppress(OSError):
            for _ in range(50):
                theirs.sendall(random_frame(draw))
            theirs.shutdown(socket.SHUT_WR)
        with pytest.raises((TransportError, OSError)):
            running.result(timeout=20)


PROTESTS = (
    r"a frame of kind \d+ with \d+ bytes is none of this protocol",
    r"it says \w+, which is for leaders to say",
    r"it says \w+ with \d+ bytes, for 2 ranks",
    r"it speaks for rank \d+, which it does not have",
)


@pytest.mark.parametrize("seed", range(20))
def test_random_frames_of_a_host_end_its_link_and_nothing_else(leading: Leading, seed: int) -> None:
    draw = random.Random(f"host {seed}")
    leading.begin()
    with suppress(OSError):
        for _ in range(50):
            leading.host.to_leader.sendall(random_frame(draw))
        leading.host.to_leader.shutdown(socket.SHUT_WR)
    assert re.fullmatch(f"with host 1 of 2 .*: ({'|'.join(PROTESTS)})", leading.why_lost())


@pytest.mark.parametrize(
    "place",
    [
        *((0, 1, 2, 1, 1), (1, 0, 2, 1, 1), (1, 2, 2, 1, 1), (9, 9, 9, 1, 1), (16, 16, 32, 1, 1), (2, 3, 8, 1, 1)),
        *((1, 1, 2, 0, 1), (1, 1, 2, 1, 0), (1, 1, 2, 1, 2), (1, 1, 4, 2, 1), (2, 2, 4, 3, 1), (2, 2, 8, 2, 2)),
    ],
)
def test_a_place_that_cannot_be_is_refused(place: tuple[int, ...]) -> None:
    (incoming, theirs), (outgoing, unread) = socket.socketpair(), socket.socketpair()
    with incoming, theirs, outgoing, unread, ThreadPoolExecutor(1) as pool:
        running = pool.submit(HostSession(Link(incoming, outgoing, lambda: True), KVEndpoint(SECRET), lambda: None).run)
        theirs.sendall(Frame(FrameKind.PLACE, size=PLACE.size).pack() + PLACE.pack(*place))
        with pytest.raises(TransportError, match="a place that no host of a group has"):
            running.result(timeout=20)
