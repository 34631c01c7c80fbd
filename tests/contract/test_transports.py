"""Contract of every transport: exact bytes, nothing else touched, bad peers and indices refused, every death seen.

Sources of cma, tcp and nixl are real processes. Reads name blocks in every order a caller could.
"""

import gc
import random
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from tandem.core.errors import IncompatiblePeerError, TransportError
from tandem.tls.authority import Authority
from tandem.tls.identity import CertifiedRole
from tandem.transport.base import KVTransport, Peer
from tandem.transport.card import Identity
from tandem.transport.nixl.bindings import unavailable_reason
from tandem.transport.transfer import Transfer, TransferState
from tests.helpers.secret import SECRET
from tests.helpers.transport_kinds import Kind, Source, resources
from tests.helpers.transport_pools import COMPATIBILITY, Pages, expected_pages, seeded_pages, wait_over
from tests.helpers.transport_process import SourceSpec

NUM_BLOCKS, PAGE_BYTES = 64, 4096
WAIT_S = 20.0
SMALL = SourceSpec("", num_blocks=NUM_BLOCKS, page_bytes=PAGE_BYTES)
LARGE = SourceSpec("", num_blocks=256, page_bytes=65536)  # 16 MiB: milliseconds a read


KINDS = ("inproc", "cma", "tcp", "tcp over TLS", "nixl")


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kind:
    if request.param == "tcp over TLS":
        directory = tmp_path_factory.mktemp("certificates")
        Authority("tests").write(directory, CertifiedRole.WORKER)
        return Kind("tcp", directory)
    reason = unavailable_reason() if request.param == "nixl" else None
    if reason is not None:
        pytest.skip(reason)
    return Kind(request.param)


@pytest.fixture(scope="module")
def source(kind: Kind) -> Iterator[Source]:
    """A source that tests share and leave alive."""
    with kind.source(SMALL) as source:
        yield source


@pytest.fixture
def pages() -> Pages:
    """The reader's own pool."""
    return seeded_pages(99, NUM_BLOCKS, PAGE_BYTES)


@pytest.fixture
def reader(kind: Kind, pages: Pages) -> Iterator[KVTransport]:
    transport = kind.reader(pages)
    yield transport
    transport.close()


@pytest.fixture
def peer(reader: KVTransport, source: Source) -> Peer:
    return reader.connect(source.card)


def done(transfer: Transfer) -> None:
    assert transfer.wait(WAIT_S)
    assert transfer.state is TransferState.DONE, transfer.error


def shuffled(seed: int, count: int = NUM_BLOCKS - 1) -> list[int]:
    return random.Random(seed).sample(range(1, NUM_BLOCKS), count)


PATTERNS = {
    "one block": ([5], [9]),
    "the last block": ([NUM_BLOCKS - 1], [1]),
    "all in order": (list(range(1, NUM_BLOCKS)), list(range(1, NUM_BLOCKS))),
    "all backwards": (list(range(1, NUM_BLOCKS)), list(range(NUM_BLOCKS - 1, 0, -1))),
    "all scattered": (shuffled(1), shuffled(2)),
    "adjacent runs": ([*range(10, 20), *range(40, 44)], [*range(30, 40), *range(1, 5)]),
    "runs on one side only": (list(range(10, 26)), list(range(1, 64, 4))),
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_bytes_arrive_exactly_and_nothing_else_changes(
    pattern: str, reader: KVTransport, peer: Peer, source: Source, pages: Pages
) -> None:
    remote_blocks, local_blocks = PATTERNS[pattern]
    expected = expected_pages(pages, source.pages, remote_blocks, local_blocks)
    transfer = reader.read(peer, remote_blocks, local_blocks)
    done(transfer)
    assert np.array_equal(pages, expected)
    assert transfer.num_bytes == len(remote_blocks) * PAGE_BYTES
    assert transfer.is_over
    assert transfer.finished_s is not None
    assert transfer.finished_s >= transfer.started_s


def test_random_reads_one_after_another(reader: KVTransport, peer: Peer, source: Source, pages: Pages) -> None:
    expected = pages.copy()
    for seed in range(60):
        count = random.Random(seed).randint(1, NUM_BLOCKS - 1)
        remote_blocks, local_blocks = shuffled(seed, count), shuffled(1000 + seed, count)
        expected = expected_pages(expected, source.pages, remote_blocks, local_blocks)
        done(reader.read(peer, remote_blocks, local_blocks))
        assert np.array_equal(pages, expected)


def test_many_reads_at_once_from_many_threads(reader: KVTransport, peer: Peer, source: Source, pages: Pages) -> None:
    remote_blocks, local_blocks = shuffled(3), shuffled(4)
    expected = expected_pages(pages, source.pages, remote_blocks, local_blocks)
    transfers: list[Transfer] = []

    def read_share(share: int) -> None:
        for index in range(share, NUM_BLOCKS - 1, 8):
            transfers.append(reader.read(peer, remote_blocks[index : index + 1], local_blocks[index : index + 1]))

    threads = [threading.Thread(target=read_share, args=(share,)) for share in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for transfer in transfers:
        done(transfer)
    assert len(transfers) == NUM_BLOCKS - 1
    assert np.array_equal(pages, expected)


@pytest.mark.parametrize(
    ("remote_blocks", "local_blocks", "words"),
    [
        ([0], [1], "remote block 0 "),
        ([1], [0], "local block 0 "),
        ([NUM_BLOCKS], [1], f"remote block {NUM_BLOCKS} "),
        ([1], [NUM_BLOCKS], f"local block {NUM_BLOCKS} "),
        ([-1], [1], "remote block -1 "),
        ([1], [-1], "local block -1 "),
        ([2**63], [1], f"remote block {2**63} "),
        ([2**70], [1], "not a list of block indices"),
        ([1.5], [1], "not a list of block indices"),
        ([3, 3], [1, 2], "remote block 3 is named more than once"),
        ([1, 2], [3, 3], "local block 3 is named more than once"),
        ([1, 2], [1], "2 remote and 1 local blocks"),
        ([], [], "0 remote and 0 local blocks"),
    ],
)
def test_bad_indices_are_refused_and_touch_nothing(
    remote_blocks: list[int],
    local_blocks: list[int],
    words: str,
    reader: KVTransport,
    peer: Peer,
    pages: Pages,
) -> None:
    before = pages.copy()
    with pytest.raises(TransportError, match=words):
        reader.read(peer, remote_blocks, local_blocks)
    assert np.array_equal(pages, before)


def test_a_card_with_any_byte_flipped_is_refused(reader: KVTransport, source: Source) -> None:
    for position in range(len(source.card)):
        damaged = bytearray(source.card)
        damaged[position] ^= 1 << (position % 8)
        with pytest.raises(IncompatiblePeerError):
            reader.connect(bytes(damaged))
    reader.connect(source.card)


def test_truncated_and_foreign_cards_are_refused(reader: KVTransport, source: Source) -> None:
    shorter = [source.card[:length] for length in range(len(source.card))]
    for card in [*shorter, source.card + b"\0", b"GET / HTTP/1.1\r\n\r\n" * 9, bytes(2_000_000)]:
        with pytest.raises(IncompatiblePeerError):
            reader.connect(card)


def test_an_incompatible_peer_is_refused_naming_every_mismatch(kind: Kind, reader: KVTransport) -> None:
    theirs = COMPATIBILITY | {"dtype": "float32", "block_size": "32", "extra": "yes"}
    spec = SourceSpec("", page_bytes=8192, compatibility=theirs)
    with kind.source(spec) as other, pytest.raises(IncompatiblePeerError) as refusal:
        reader.connect(other.card)
    for words in (
        "page_bytes: peer 8192, here 4096",
        "dtype: peer 'float32', here 'bfloat16'",
        "block_size: peer '32', here '16'",
        "extra: peer 'yes', here '(absent)'",
    ):
        assert words in str(refusal.value)
    assert "kv_layout" not in str(refusal.value)


def test_a_peer_with_another_secret_is_refused(kind: Kind, reader: KVTransport) -> None:
    spec = SourceSpec("", secret="ab" * 32)
    with kind.source(spec) as other, pytest.raises(IncompatiblePeerError, match="another cluster secret"):
        reader.connect(other.card)


def test_the_card_of_another_kind_of_transport_is_refused(kind: Kind, reader: KVTransport) -> None:
    other_kind = Kind("inproc" if kind.has_processes else "tcp")
    with other_kind.source(SMALL) as other, pytest.raises(IncompatiblePeerError, match="transport: peer"):
        reader.connect(other.card)


def test_a_worker_is_not_its_own_peer(reader: KVTransport) -> None:
    with pytest.raises(IncompatiblePeerError, match="itself"):
        reader.connect(reader.card())


def test_peers_may_differ_in_size_and_read_each_other(kind: Kind, pages: Pages) -> None:
    """Both sides of one pair read at the same time, from pools of different sizes."""
    larger = seeded_pages(5, 3 * NUM_BLOCKS, PAGE_BYTES)
    before, before_larger = pages.copy(), larger.copy()
    small, large = kind.reader(pages), kind.reader(larger)
    down, up = small.connect(large.card()), large.connect(small.card())
    first = small.read(down, [3 * NUM_BLOCKS - 1], [1])
    second = large.read(up, [NUM_BLOCKS - 1], [2])
    done(first)
    done(second)
    assert np.array_equal(pages, expected_pages(before, before_larger, [3 * NUM_BLOCKS - 1], [1]))
    assert np.array_equal(larger, expected_pages(before_larger, before, [NUM_BLOCKS - 1], [2]))
    with pytest.raises(TransportError, match="remote block"):
        large.read(up, [NUM_BLOCKS], [2])
    small.close()
    large.close()


def test_a_peer_of_another_width_is_read_in_pieces(kind: Kind) -> None:
    """A rank's page of two KiB is half of one of a single rank; what is asked for is anywhere in both pools."""
    mine = seeded_pages(5, 20, 2048)
    before, pieces = mine.copy().reshape(-1, 512), [1, 5, 6, 7, 79, 40]
    reader = kind.reader(mine, num_ranks=2, piece_bytes=512)
    spec = SourceSpec("", num_blocks=30, piece_bytes=512)
    with kind.source(spec) as source:
        if kind.name == "nixl":
            with pytest.raises(IncompatiblePeerError, match=r"has 1 ranks, here are 2, and nixl reads whole pages"):
                reader.connect(source.card)
            return
        peer = reader.connect(source.card)
        assert (peer.unit_bytes, peer.num_blocks, peer.num_ranks) == (512, 240, 1)
        transfer = reader.read(peer, [239, 17, 18, 19, 4, 200], pieces)
        done(transfer)
        assert transfer.num_bytes == 6 * 512
        theirs = source.pages.reshape(-1, 512)
        assert np.array_equal(mine.reshape(-1, 512), expected_pages(before, theirs, [239, 17, 18, 19, 4, 200], pieces))
        for remote, local in ((240, 1), (1, 80), (0, 1)):
            with pytest.raises(TransportError, match="cannot be transferred"):
                reader.read(peer, [remote], [local])
    reader.close()


def test_a_peer_of_the_same_width_is_read_in_pages(kind: Kind, pages: Pages) -> None:
    reader = kind.reader(pages, num_ranks=2, piece_bytes=512)
    with kind.source(SourceSpec("", num_ranks=2, piece_bytes=512)) as source:
        assert reader.connect(source.card).unit_bytes == PAGE_BYTES
    with (
        kind.source(SourceSpec("", num_ranks=4, piece_bytes=256)) as other,
        pytest.raises(IncompatiblePeerError, match="num_ranks: peer 4, here 2; piece_bytes: peer 256, here 512"),
    ):
        reader.connect(other.card)
    reader.close()


def test_callbacks_run_once_before_or_after_the_end(reader: KVTransport, peer: Peer) -> None:
    calls: list[str] = []
    called = threading.Event()
    transfer = reader.read(peer, [1], [1])
    transfer.add_done_callback(lambda transfer: calls.append(f"{transfer.state} in time"))
    transfer.add_over_callback(lambda _: called.set())
    assert called.wait(WAIT_S)
    done(transfer)
    transfer.add_done_callback(lambda transfer: calls.append(f"{transfer.state} late"))
    transfer.add_over_callback(lambda _: calls.append("over late"))
    assert calls == ["done in time", "done late", "over late"]


def test_a_callback_may_use_the_transport(reader: KVTransport, peer: Peer, source: Source, pages: Pages) -> None:
    """The next chunk is asked for where the last one ended."""
    chained: list[Transfer] = []
    ended = threading.Event()

    def read_next(_: Transfer) -> None:
        chained.append(reader.read(peer, [2], [2]))
        chained[0].add_done_callback(lambda _: reader.disconnect(peer))
        chained[0].add_done_callback(lambda _: ended.set())

    reader.read(peer, [1], [1]).add_done_callback(read_next)
    assert ended.wait(WAIT_S)
    done(chained[0])
    assert np.array_equal(pages[1:3], source.pages[1:3])


def test_a_read_past_its_deadline_fails_and_touches_nothing(reader: KVTransport, peer: Peer, pages: Pages) -> None:
    before = pages.copy()
    transfer = reader.read(peer, [1, 2, 3], [4, 5, 6], deadline_s=-1.0)
    assert wait_over(transfer, WAIT_S)
    assert transfer.state is TransferState.FAILED
    assert "deadline" in str(transfer.error)
    done(reader.read(peer, [1], [1]))
    assert np.array_equal(np.delete(pages, 1, axis=0), np.delete(before, 1, axis=0))


def test_a_disconnected_peer_is_not_read_but_can_connect_again(
    reader: KVTransport, peer: Peer, source: Source, pages: Pages
) -> None:
    reader.disconnect(peer)
    reader.disconnect(peer)
    with pytest.raises(TransportError, match="not connected"):
        reader.read(peer, [1], [1])
    first, second = reader.connect(source.card), reader.connect(source.card)
    reader.disconnect(first)
    done(reader.read(second, [1], [1]))
    assert np.array_equal(pages[1], source.pages[1])


def test_a_closed_transport_refuses_everything(kind: Kind, source: Source, pages: Pages) -> None:
    transport = kind.reader(pages)
    peer = transport.connect(source.card)
    transport.close()
    transport.close()
    with pytest.raises(TransportError, match="closed"):
        transport.read(peer, [1], [1])
    with pytest.raises(TransportError, match="closed"):
        transport.connect(source.card)
    transport.disconnect(peer)


def large_reader(kind: Kind) -> tuple[KVTransport, Pages]:
    pages = np.zeros((LARGE.num_blocks, LARGE.page_bytes), dtype=np.uint8)
    return kind.reader(pages), pages


def read_all(transport: KVTransport, peer: Peer, times: int, deadline_s: float | None = None) -> list[Transfer]:
    """The whole pool, `times` times into the same blocks."""
    blocks = range(1, LARGE.num_blocks)
    return [transport.read(peer, blocks, blocks, deadline_s) for _ in range(times)]


def test_closing_ends_every_read_and_no_byte_follows(kind: Kind) -> None:
    with kind.source(LARGE) as source:
        transport, pages = large_reader(kind)
        transfers = read_all(transport, transport.connect(source.card), 100)
        assert transfers[0].wait(WAIT_S)
        transport.close()
        after = pages.copy()
        assert all(transfer.is_over for transfer in transfers)
        assert transfers[0].state is TransferState.DONE
        assert transfers[-1].state is TransferState.FAILED
        assert np.array_equal(pages, after)


def test_disconnecting_ends_the_reads_of_that_peer_only(kind: Kind) -> None:
    with kind.source(LARGE) as source, kind.source(LARGE) as other:
        transport, pages = large_reader(kind)
        leaving, staying = transport.connect(source.card), transport.connect(other.card)
        transfers = read_all(transport, leaving, 100)
        transport.disconnect(leaving)
        kept = transport.read(staying, [1], [1])
        assert all(wait_over(transfer, WAIT_S) for transfer in transfers)
        assert transfers[-1].state is TransferState.FAILED
        done(kept)
        assert np.array_equal(pages[1], other.pages[1])
        transport.close()


def test_a_source_that_closes_while_it_is_read(kind: Kind) -> None:
    with kind.source(LARGE) as source:
        transport, pages = large_reader(kind)
        peer = transport.connect(source.card)
        transfers = read_all(transport, peer, 100)
        assert transfers[0].wait(WAIT_S)
        source.stop()
        assert all(wait_over(transfer, WAIT_S) for transfer in transfers)
        assert np.array_equal(pages[1:], source.pages[1:])
        assert transfers[-1].state is TransferState.FAILED
        with pytest.raises(TransportError):
            transport.connect(source.card)
        transport.close()


# Workers of one process do not die alone.
between_processes = pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "inproc"], indirect=True)


@between_processes
def test_a_source_killed_while_it_is_read(kind: Kind) -> None:
    """Seen at once; afterwards the old card is refused and a new source works."""
    with kind.process(LARGE) as source:
        transport, pages = large_reader(kind)
        peer = transport.connect(source.card)
        transfers = read_all(transport, peer, 200)
        assert transfers[0].wait(WAIT_S)
        source.kill()
        assert all(wait_over(transfer, WAIT_S) for transfer in transfers)
        assert transfers[-1].state is TransferState.FAILED
        assert "deadline" not in str(transfers[-1].error)
        assert np.array_equal(pages[1:], source.pages[1:])
    with pytest.raises(TransportError, match=peer.incarnation):
        transport.connect(source.card)
    with kind.process(LARGE) as successor:
        done(read_all(transport, transport.connect(successor.card), 1)[0])
        assert np.array_equal(pages[1:], successor.pages[1:])
    transport.close()


@between_processes
def test_a_source_stopped_while_it_is_read(kind: Kind) -> None:
    """No read outlives its deadline, and none that is over writes when the source wakes. One-sided reads may go on."""
    with kind.process(LARGE) as source:
        transport, pages = large_reader(kind)
        peer = transport.connect(source.card)
        done(read_all(transport, peer, 1)[0])
        source.freeze()
        transfers = read_all(transport, peer, 100, deadline_s=0.5)
        assert all(transfer.wait(WAIT_S) for transfer in transfers)
        assert all(wait_over(transfer, WAIT_S) for transfer in transfers)
        if kind.name == "tcp":
            assert transfers[-1].state is TransferState.FAILED
            assert "deadline" in str(transfers[-1].error)
        pages[:] = 0
        source.thaw()
        done(transport.read(transport.connect(source.card), [7], [7]))
        assert np.array_equal(pages[7], source.pages[7])
        assert not np.delete(pages, 7, axis=0).any()
        transport.close()


def test_a_restarted_worker_is_not_mistaken_for_its_predecessor(kind: Kind, reader: KVTransport) -> None:
    with kind.source(SMALL) as first:
        stale = first.card
        peer = reader.connect(stale)
        first.stop()
    with kind.source(SMALL) as second:
        with pytest.raises(TransportError, match=peer.incarnation):
            reader.connect(stale)
        done(reader.read(reader.connect(second.card), [1], [1]))


def test_nothing_leaks(kind: Kind, source: Source, pages: Pages) -> None:
    def cycle() -> None:
        transport = kind.reader(pages, Identity(COMPATIBILITY, SECRET))
        for _ in range(3):
            peer = transport.connect(source.card)
            done(transport.read(peer, [1, 2], [3, 4]))
            transport.disconnect(peer)
        done(transport.read(transport.connect(source.card), [1], [1]))
        with pytest.raises(IncompatiblePeerError):
            transport.connect(b"garbage")
        transport.close()

    cycle()
    gc.collect()  # NOTE: what earlier tests left to the collector may be open
    before = resources()
    for _ in range(4):
        cycle()
    assert resources() == before
