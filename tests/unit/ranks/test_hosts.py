"""Ranks on several hosts, as process trees of their own: the bits of one rank, what a lost host or rank ends, and who
is let in.
"""

import os
import pickle
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tandem.compute.native.links import SharedLinks
from tandem.compute.native.links_layout import make_links_memory
from tandem.core.errors import ConfigurationError, RanksLostError, TransportError
from tandem.engine.engine import Engine
from tandem.engine.resolve import build_engine
from tandem.ranks.frames import HEADER, NUMBER, Frame, FrameKind
from tandem.ranks.host import HostSession
from tandem.ranks.host_group import HostGroup
from tandem.ranks.host_kv import KVEndpoint
from tandem.ranks.link import Link
from tandem.ranks.messages import Loaded, pack, unpack
from tandem.ranks.rank_process import RankProcess
from tandem.ranks.rendezvous import JOIN, Direction, join, own_release
from tandem.tls.authority import Authority
from tandem.tls.identity import CertifiedRole
from tandem.worker.ranks import report_of
from tests.helpers import checkpoints
from tests.helpers.engines import drain
from tests.helpers.native_kernels import load_or_skip
from tests.helpers.rank_hosts import engine_over_hosts, proof, rank_host
from tests.helpers.ranked import PARAMS, PROMPTS, answers, ranked_config
from tests.helpers.secret import SECRET
from tests.helpers.tokenizers import NUM_TOKENS, write_byte_tokenizer

RELEASE = "of the test"


@pytest.fixture(autouse=True, scope="module")
def _compiled() -> None:
    load_or_skip()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen2")
    saved = {"vocab_size": NUM_TOKENS, "eos_token_id": NUM_TOKENS - 1}
    return write_byte_tokenizer(checkpoints.save_tiny_qwen2(path, dtype="bfloat16", **saved))


@pytest.fixture(scope="module")
def checkpoint_of_four_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("four")
    saved = {"vocab_size": NUM_TOKENS, "eos_token_id": NUM_TOKENS - 1, "num_hidden_layers": 4}
    return write_byte_tokenizer(checkpoints.save_tiny_qwen2(path, dtype="bfloat16", **saved))


@contextmanager
def listening(num_hosts: int = 2, release: str = RELEASE) -> Iterator[HostGroup]:
    hosts = HostGroup(("127.0.0.1", 0), proof(), num_hosts, num_hosts, release=release)
    try:
        yield hosts
    finally:
        hosts.close()


def one_rank(checkpoint: Path) -> dict[tuple[str, int], list[tuple[object, ...]]]:
    single = build_engine(ranked_config(checkpoint))
    found = answers(single)
    single.close()
    return found


@pytest.mark.parametrize(("num_ranks", "num_hosts"), [(4, 2), pytest.param(4, 4, marks=pytest.mark.slow)])
def test_hosts_have_the_bits_of_one_rank(checkpoint: Path, num_ranks: int, num_hosts: int) -> None:
    """Of two hosts each speaks for two ranks; of four, what one publishes reaches the others by the leader."""
    with engine_over_hosts(ranked_config(checkpoint), num_ranks, num_hosts) as (engine, group, others):
        found = answers(engine)
        ranks = [rank for other in others for rank in other.children()]
        assert len(ranks) == num_ranks - num_ranks // num_hosts
        assert not any("TANDEM_CLUSTER_SECRET" in rank.environ() for rank in ranks)
        report = report_of(group)
        assert report is not None
        here = num_ranks // num_hosts
        names = [f"host {1 + index // here} of {num_hosts} (127.0.0.1)" for index in range(num_ranks - here)]
        assert report.hosts == (*[""] * here, *names)
        assert sorted(report.pids[here:]) == sorted(rank.pid for rank in ranks)
    assert found == one_rank(checkpoint)


@pytest.mark.parametrize(
    ("width", "num_stages", "num_contexts", "num_hosts"),
    [
        (1, 2, 1, 2),
        *(
            pytest.param(*sizes, marks=pytest.mark.slow)
            for sizes in ((2, 2, 1, 2), (1, 4, 1, 2), (1, 4, 1, 4), (1, 2, 2, 2), (2, 4, 1, 4))
        ),
    ],
)
def test_stages_on_several_hosts_have_the_bits_of_one_rank(
    checkpoint_of_four_layers: Path, width: int, num_stages: int, num_contexts: int, num_hosts: int
) -> None:
    """Of four hosts, two that do not lead pass the residual stream to each other by the leader."""
    num_ranks = width * num_stages * num_contexts
    config = ranked_config(checkpoint_of_four_layers, max_num_batched_tokens=100)
    with engine_over_hosts(config, num_ranks, num_hosts, num_stages=num_stages, num_contexts=num_contexts) as (
        engine,
        group,
        _,
    ):
        found = answers(engine)
        here = num_ranks // num_hosts
        assert len(set(group.stages[:here])) == num_stages // num_hosts
        assert all(group.hosts[here:])
        assert not any(group.hosts[:here])
    assert found == one_rank(checkpoint_of_four_layers)


@pytest.mark.parametrize(
    ("num_ranks", "num_stages"), [(2, 1), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((2, 2), (4, 2)))]
)
def test_an_encrypted_group_is_formed_anew_with_its_kv_when_a_rank_elsewhere_is_killed(
    checkpoint: Path, tmp_path: Path, num_ranks: int, num_stages: int
) -> None:
    tls = tmp_path / "tls"
    Authority("chat.default").write(tls, CertifiedRole.WORKER)
    config = ranked_config(checkpoint)
    last = num_ranks - 1
    with engine_over_hosts(config, num_ranks, 2, num_stages=num_stages, tls=tls) as (engine, group, (other,)):
        engine.add_request(PROMPTS["choices"], PARAMS["greedy"], request_id="a")
        before = drain(engine)["a", 0][-1]
        psutil.Process(group.process_ids[last]).kill()
        engine.add_request(PROMPTS["choices"], PARAMS["greedy"], request_id="b")
        with pytest.raises(RanksLostError, match=rf"rank {last} of {num_ranks}") as lost:
            drain(engine)
        engine.abort("b")
        engine.recover(lost.value)
        engine.add_request(PROMPTS["choices"], PARAMS["greedy"], request_id="c")
        after = drain(engine)["c", 0][-1]
        assert other.is_running()
    assert (after.token_ids, after.logprobs) == (before.token_ids, before.logprobs)
    assert after.metrics is not None
    assert after.metrics.num_cached_tokens >= 64, "the KV of the rank that was killed is still there"


def lost_host(engine: Engine) -> str:
    """Error with which the engine reports the loss; checks that it cannot recover."""
    engine.add_request(PROMPTS["greedy"], PARAMS["greedy"], request_id="lost")
    with pytest.raises(RanksLostError) as lost:
        drain(engine)
    engine.abort("lost")
    with pytest.raises(RanksLostError, match=r"host 1 of 2 \(127.0.0.1\) is lost, .* has to be started again"):
        engine.recover(lost.value)
    return str(lost.value)


LOST = {  # whether a stopped host's rank or its link is found silent first is chance
    signal.SIGKILL: r"rank 1 of 2 has ended, with host 1 of 2 \(127\.0\.0\.1\): .*",
    signal.SIGSTOP: r"rank 1 of 2 has (stood still|ended, with host 1 of 2 \(.*\): it has been silent) for 1\.5 s",
}


@pytest.mark.parametrize(
    ("number", "num_stages"),
    [
        *((signal.SIGKILL, 1), (signal.SIGSTOP, 1), (signal.SIGKILL, 2)),
        pytest.param(signal.SIGSTOP, 2, marks=pytest.mark.slow),
    ],
)
def test_a_lost_host_is_found_within_two_seconds_and_ends_the_group(
    checkpoint: Path, number: signal.Signals, num_stages: int
) -> None:
    """A host that is stopped is one that a network no longer reaches: its link stays open, and nothing comes."""
    with engine_over_hosts(ranked_config(checkpoint), 2, 2, num_stages=num_stages) as (engine, group, (other,)):
        noticed = threading.Event()
        group.on_lost = noticed.set
        (rank,) = other.children()
        other.send_signal(number)
        began_s = time.monotonic()
        assert noticed.wait(10)
        assert time.monotonic() - began_s < 2.5, "1.5 s of silence, and a loaded machine"
        assert re.fullmatch(LOST[number], lost_host(engine))
        if number == signal.SIGSTOP:
            other.send_signal(signal.SIGCONT)
        assert psutil.wait_procs([rank], timeout=20)[1] == [], "its ranks end with it"


def test_a_host_serves_one_leader_after_the_other_and_leaves_with_the_last() -> None:
    with listening(release=own_release()) as first, rank_host(first.port) as process:
        first.wait(60)
        port = first.port
        first.close()
        again = HostGroup(("127.0.0.1", port), proof(), 2, 2)
        try:
            again.wait(60)
            leaving = threading.Event()
            again.on_leaving = leaving.set
            process.terminate()
            assert leaving.wait(20), "its leader is to drain"
            assert process.is_running()
        finally:
            again.close()
        assert process.wait(20) == 0


def test_a_stranger_is_not_let_in_and_learns_nothing() -> None:
    with listening() as hosts:
        strange = proof(secret=b"another secret of a stranger")
        with pytest.raises(ConfigurationError, match="do not share a cluster secret"):
            join(("127.0.0.1", hosts.port), strange, bytes(16), Direction.TO_HOST, RELEASE)
        with socket.create_connection(("127.0.0.1", hosts.port), timeout=10) as raw:
            raw.sendall(bytes(JOIN.size))
            received = b""
            while data := raw.recv(1000):
                received += data
        assert received.endswith(bytes(32)), "no proof of the leader's for who has none"
        with pytest.raises(ConfigurationError, match="1 of 2 hosts are there"):
            hosts.wait(0.0)


def test_another_release_is_refused_by_name() -> None:
    with listening() as hosts, pytest.raises(ConfigurationError, match="it has Tandem 0, and the leader of the test"):
        join(("127.0.0.1", hosts.port), proof(), bytes(16), Direction.TO_HOST, "Tandem 0")


def test_a_host_too_many_finds_no_place() -> None:
    with listening() as hosts:
        address = "127.0.0.1", hosts.port
        ways = [join(address, proof(), bytes(16), way, RELEASE) for way in Direction]
        hosts.wait(20)
        with pytest.raises(TransportError, match=r"all 2 hosts are there|cannot be reached"):
            join(address, proof(), bytes([9]) * 16, Direction.TO_HOST, RELEASE)
        for connection, _ in ways:
            connection.close()


def answering(port: int, num_here: int) -> threading.Thread:
    """A thread that joins as a host and starts no ranks, although it says so; it ends with the leader."""
    incoming, outgoing = (join(("127.0.0.1", port), proof(), bytes(16), way, RELEASE)[0] for way in Direction)
    link = Link(incoming, outgoing, lambda: True)

    def serve() -> None:
        with suppress(TransportError, OSError):
            while True:
                frame = link.receive()
                link.receive_bytes(frame.size)
                if frame.kind is FrameKind.BEATS:
                    link.send(frame)
                if frame.kind is FrameKind.BEGIN:
                    process_ids = NUMBER.pack(1) * num_here
                    link.send(Frame(FrameKind.STARTED, epoch=frame.epoch, size=len(process_ids)), process_ids)
                if frame.kind is FrameKind.END:
                    link.send(Frame(FrameKind.ENDED, epoch=frame.epoch))
        link.release()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize(("num_ranks", "num_stages"), [(2, 2), (4, 2), (4, 4)])
def test_an_epoch_is_followed_by_another_whichever_ranks_have_pipes_between_hosts(
    num_ranks: int, num_stages: int
) -> None:
    """Regression: the leader waited for ever for what forwards pipes in which it has no part."""
    hosts = HostGroup(("127.0.0.1", 0), proof(), 2, num_ranks, num_stages=num_stages, release=RELEASE)
    ranks: list[RankProcess] = []

    def begin(epoch: int, memory: int) -> None:
        ranks.extend(hosts.begin(epoch, memory).values())

    with closing(hosts):
        host = answering(hosts.port, num_ranks // 2)
        hosts.wait(20)
        for epoch in (1, 2, 3):
            memory = make_links_memory(num_ranks, num_stages)
            links = SharedLinks(memory, 0, num_ranks, num_stages, deadline_s=20.0)
            beginning = threading.Thread(target=begin, args=(epoch, memory), daemon=True)
            beginning.start()
            beginning.join(10)
            assert not beginning.is_alive()
            os.close(memory)
            links.end()
            while ranks:
                rank = ranks.pop()
                rank.close()
                assert rank.wait(10)
    host.join(10)
    assert not host.is_alive()
    assert not any(thread.name.startswith("tandem-forward") for thread in threading.enumerate())


def test_a_leader_that_ends_during_the_handshake_may_be_joined_again(tmp_path: Path) -> None:
    """Regression: the host ended for good, as if the leader had refused its certificate."""
    Authority("chat.default").write(tmp_path, CertifiedRole.WORKER)
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:

        def hang_up() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)

        hanging_up = pool.submit(hang_up)
        with pytest.raises(TransportError, match="broke off"):
            join(listener.getsockname(), proof(tmp_path), bytes(16), Direction.TO_HOST, RELEASE)
        hanging_up.result(timeout=10)


def test_nothing_follows_a_frame_that_was_sent_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host's next heartbeats would have been read as the rest of what its ranks had published."""
    monkeypatch.setattr("tandem.ranks.link._SEND_S", 0.1)
    (incoming, unsent), (outgoing, theirs) = socket.socketpair(), socket.socketpair()
    with incoming, unsent, outgoing, theirs:
        link = Link(incoming, outgoing, lambda: True)
        published = Frame(FrameKind.PUBLISH, size=1 << 24)
        with pytest.raises(BlockingIOError):
            link.send(published, bytes(published.size))
        theirs.settimeout(0.0)
        num_received = 0
        with suppress(BlockingIOError):
            while data := theirs.recv(1 << 20):
                num_received += len(data)
        assert 0 < num_received < HEADER.size + published.size
        with pytest.raises(BrokenPipeError):
            link.send(Frame(FrameKind.BEATS))


def test_a_leader_that_does_not_follow_the_protocol_is_left() -> None:
    """Frames that are for hosts to say."""
    (incoming, theirs), (outgoing, unread) = socket.socketpair(), socket.socketpair()
    link = Link(incoming, outgoing, lambda: True)
    with incoming, theirs, outgoing, unread, ThreadPoolExecutor(1) as pool:
        running = pool.submit(HostSession(link, KVEndpoint(SECRET), lambda: None).run)
        theirs.sendall(bytes([34]) + bytes(19))
        with pytest.raises(TransportError, match="ENDED, which is for hosts"):
            running.result(timeout=20)


def test_a_host_that_leaves_while_others_are_waited_for_gives_its_place_to_the_next() -> None:
    """It had the leader drain, which had nothing to drain, and waited for its end."""
    with listening(3) as hosts:
        told = threading.Event()
        hosts.on_leaving = told.set
        address = "127.0.0.1", hosts.port
        for number in range(3):
            ways = [join(address, proof(), bytes([number]) * 16, way, RELEASE)[0] for way in Direction]
            with ways[0], ways[1]:
                assert ways[0].recv(1), "it has a place"
                if number:
                    continue
                ways[1].sendall(Frame(FrameKind.LEAVING).pack())
                while ways[0].recv(1 << 12):
                    """Until the leader has let it go."""
        assert not told.is_set()


class _Intruder:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, ("raise SystemExit",)


def test_messages_have_no_code_in_them() -> None:
    assert unpack(pack(Loaded("e", "f"))) == Loaded("e", "f")
    for intruder in (_Intruder(), Path("/"), threading.Event):
        with pytest.raises(pickle.UnpicklingError, match="has no place in a message between ranks"):
            unpack(pickle.dumps(intruder))
    for broken in (b"", b"no pickle", pack(Loaded("e", "f"))[:-9]):
        with pytest.raises(pickle.UnpicklingError):
            unpack(broken)
