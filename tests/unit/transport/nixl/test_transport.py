"""Particulars of NIXL: reads that fail before they are over, fences, and metadata that must not reach it.

UCX is held to TCP here, where a read needs the source's process: stopping that process leaves the read under way.
"""

import json
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from tandem.core.errors import ConfigurationError, IncompatiblePeerError, TransportError
from tandem.transport.card import Identity, seal, unseal
from tandem.transport.nixl.bindings import unavailable_reason
from tandem.transport.nixl.transport import NixlTransport
from tandem.transport.transfer import TransferState
from tests.helpers.secret import SECRET
from tests.helpers.transport_pools import COMPATIBILITY, Pages, pool_of, wait_over
from tests.helpers.transport_process import SourceProcess, SourceSpec

pytestmark = pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))

NUM_BLOCKS, PAGE_BYTES = 128, 65536
WAIT_S = 10.0


@pytest.fixture(autouse=True)
def tcp_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of this process and of those that it starts."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")


@pytest.fixture
def source(tcp_only: None) -> Iterator[SourceProcess]:
    spec = SourceSpec("nixl", num_blocks=NUM_BLOCKS, page_bytes=PAGE_BYTES)
    with SourceProcess(spec) as process:
        yield process


@pytest.fixture
def pages() -> Pages:
    return np.zeros((NUM_BLOCKS, PAGE_BYTES), dtype=np.uint8)


def reader_of(pages: Pages, fence_after_s: float = 30.0) -> NixlTransport:
    return NixlTransport(pool_of(pages), Identity(COMPATIBILITY, SECRET), fence_after_s=fence_after_s)


@pytest.fixture
def reader(pages: Pages) -> Iterator[NixlTransport]:
    transport = reader_of(pages)
    yield transport
    transport.close()


BLOCKS = range(1, NUM_BLOCKS)


def test_a_late_read_fails_in_time_but_is_over_only_when_nixl_says_so(
    source: SourceProcess, reader: NixlTransport, pages: Pages
) -> None:
    """The case that pinning is for: the source wakes after the deadline, and the bytes still arrive."""
    peer = reader.connect(source.card)
    source.freeze()
    late = reader.read(peer, BLOCKS, BLOCKS, deadline_s=0.2)
    assert late.wait(WAIT_S)
    assert late.state is TransferState.FAILED
    assert "deadline" in str(late.error)
    assert not late.is_over
    source.thaw()
    assert wait_over(late, WAIT_S)
    assert np.array_equal(pages[1:], source.pages[1:])
    after = reader.read(peer, BLOCKS, BLOCKS)
    assert after.wait(WAIT_S)
    assert after.state is TransferState.DONE


def test_after_a_fence_every_read_is_over_and_nothing_is_written(
    source: SourceProcess, reader: NixlTransport, pages: Pages
) -> None:
    peer = reader.connect(source.card)
    old_card = reader.card()
    source.freeze()
    late = reader.read(peer, BLOCKS, BLOCKS, deadline_s=0.1)
    assert late.wait(WAIT_S)
    reader.fence()
    assert late.is_over
    assert not pages.any()
    source.thaw()
    with SourceProcess(replace(source.spec, seed=8)) as other:
        fresh = reader.connect(other.card)
        transfer = reader.read(fresh, [1], [1])
        assert transfer.wait(WAIT_S)
        assert np.array_equal(pages[1], other.pages[1])
        assert not pages[2:].any()
    with pytest.raises(TransportError, match="connect"):
        reader.read(peer, [1], [1])
    assert reader.card() != old_card


def test_after_a_fence_no_peer_is_read_by_what_the_former_agent_knew(
    source: SourceProcess, reader: NixlTransport, pages: Pages
) -> None:
    peer = reader.connect(source.card)
    reader.fence()
    with pytest.raises(TransportError, match="connect"):
        reader.read(peer, [1], [1])
    reader.disconnect(peer)
    again = reader.read(reader.connect(source.card), [1], [1])
    assert again.wait(WAIT_S)
    assert np.array_equal(pages[1], source.pages[1])


def test_the_fence_comes_by_itself(source: SourceProcess, pages: Pages) -> None:
    reader = reader_of(pages, fence_after_s=0.2)
    peer = reader.connect(source.card)
    source.freeze()
    late = reader.read(peer, BLOCKS, BLOCKS, deadline_s=0.1)
    assert wait_over(late, WAIT_S)
    assert late.state is TransferState.FAILED
    assert not pages.any()
    with pytest.raises(TransportError, match="connect"):
        reader.read(peer, [1], [1])
    reader.close()


def test_closing_is_a_fence(source: SourceProcess, pages: Pages) -> None:
    reader = reader_of(pages)
    peer = reader.connect(source.card)
    source.freeze()
    transfer = reader.read(peer, BLOCKS, BLOCKS)
    reader.close()
    assert transfer.is_over
    assert transfer.state is TransferState.FAILED
    assert not pages.any()


def test_a_stopped_peer_is_not_connected_to(source: SourceProcess, reader: NixlTransport) -> None:
    source.freeze()
    with pytest.raises(TransportError, match="cannot be reached"):
        reader.connect(source.card)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"metadata": "!"}, "no NIXL address"),
        ({"name": None, "pool": 3}, "no NIXL address"),
        ({"pool": {"address": 1}}, "no NIXL address"),
    ],
)
def test_metadata_we_cannot_read_never_reaches_nixl(
    change: dict[str, object], words: str, source: SourceProcess, reader: NixlTransport
) -> None:
    identity = Identity(COMPATIBILITY, SECRET)
    card = unseal(source.card, identity)
    wrong = json.dumps(json.loads(card.metadata) | change).encode()
    with pytest.raises(IncompatiblePeerError, match=words):
        reader.connect(seal(replace(card, metadata=wrong), identity))


def test_a_card_whose_pools_differ_is_refused(source: SourceProcess, reader: NixlTransport) -> None:
    identity = Identity(COMPATIBILITY, SECRET)
    card = unseal(source.card, identity)
    with pytest.raises(IncompatiblePeerError, match="contradicts itself"):
        reader.connect(seal(replace(card, num_blocks=NUM_BLOCKS + 1), identity))


def test_a_card_of_another_incarnation_than_answers_is_refused(source: SourceProcess, reader: NixlTransport) -> None:
    """As when a process took over the address of one that died."""
    identity = Identity(COMPATIBILITY, SECRET)
    card = unseal(source.card, identity)
    with pytest.raises(IncompatiblePeerError, match=f"{'ab' * 16}, but {card.incarnation} answers"):
        reader.connect(seal(replace(card, incarnation="ab" * 16), identity))


def test_a_ucx_setting_it_does_not_know_is_a_matter_of_configuration(
    pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", "carrier-pigeon")
    with pytest.raises(ConfigurationError, match="does not start"):
        NixlTransport(pool_of(pages), Identity(COMPATIBILITY, SECRET))
