"""In how many requests and pieces a chunk of a prompt moves between workers of any widths, counted exactly.

The naive count is a request for each layer, of K and of V, each block, and each range of heads that one rank of the
source has for one of the reader.
"""

import math
from collections.abc import Sequence
from typing import ClassVar

import pytest

from tandem.architecture.state import KVSpec, LatentSpec, StateSpec
from tandem.kvcache.ranked_layout import RankedLayout, num_parts
from tandem.kvcache.spec import build_layout
from tandem.transport.base import MemoryPool, Peer
from tandem.transport.blocks import Indices, plan_read
from tandem.transport.card import Identity
from tandem.transport.nixl import transport as nixl
from tandem.transport.nixl.agent import IDENTITY_BYTES, Region, RemoteAgent, region_of
from tandem.transport.reshard import Resharding
from tandem.transport.transfer import TransferState
from tests.helpers.secret import SECRET
from tests.helpers.transport_pools import COMPATIBILITY

BLOCK_SIZE, NUM_BLOCKS, NUM_LAYERS = 16, 32, 28
HEADS = (KVSpec(8, 128, "bfloat16"),) * NUM_LAYERS  # of Qwen3-0.6B; a chunk of 512 tokens
LATENTS = (LatentSpec(512, 64, "bfloat16"),) * NUM_LAYERS


def counts(specs: Sequence[StateSpec], prefill: int, decode: int, step: int) -> tuple[int, int, int]:
    """(reads, pieces that lie together on both sides, bytes) of a chunk in every `step`-th block of both pools."""
    whole = build_layout(specs, BLOCK_SIZE)
    source, reader = (RankedLayout(whole, num_parts(whole, ranks)) for ranks in (prefill, decode))
    unit = reader.page_bytes if source.parts == reader.parts else reader.piece_bytes
    num_blocks = 1 + step * NUM_BLOCKS
    units = [side.num_ranks * num_blocks * side.page_bytes // unit for side in (source, reader)]
    found = Resharding(reader, num_blocks, Peer("tcp", "x", units[0], 1, unit, *source.parts))
    blocks = [(block,) for block in range(1, num_blocks, step)]
    reads = found.reads([(0, index) for index in range(NUM_BLOCKS)], blocks, blocks)
    pieces = [plan_read(read.remote, read.local, *units) for read in reads]
    return len(reads), sum(map(len, pieces)), sum(len(read.local) for read in reads) * unit


@pytest.mark.parametrize("prefill", [1, 2, 4])
@pytest.mark.parametrize("decode", [1, 2, 4])
def test_a_chunk_is_one_request_for_each_rank_of_the_reader_at_most(prefill: int, decode: int) -> None:
    """Between equal widths a piece is a block of a rank, with all its layers; blocks that lie together are one."""
    ranges = max(prefill, decode)
    naive = 2 * NUM_LAYERS * NUM_BLOCKS * ranges
    num_bytes = NUM_BLOCKS * build_layout(HEADS, BLOCK_SIZE).page_bytes
    if prefill == decode:
        assert counts(HEADS, prefill, decode, 2) == (1, NUM_BLOCKS * ranges, num_bytes)
        assert counts(HEADS, prefill, decode, 1) == (1, ranges, num_bytes)
    else:
        assert counts(HEADS, prefill, decode, 2) == (decode, naive, num_bytes)
        assert counts(HEADS, prefill, decode, 1) == (decode, naive, num_bytes)


@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (4, 1), (2, 4)])
def test_latents_are_whole_pages_between_all_widths(prefill: int, decode: int) -> None:
    num_bytes = NUM_BLOCKS * build_layout(LATENTS, BLOCK_SIZE).page_bytes
    assert counts(LATENTS, prefill, decode, 2) == (1, NUM_BLOCKS, num_bytes)


class CountingAgent:
    """In place of `NixlAgent`: counts the requests that are posted, and the blocks of each; nothing moves."""

    proofs: ClassVar[dict[str, bytes]] = {}  # of all agents, by name
    posts: ClassVar[list[int]] = []

    def __init__(self, pool: MemoryPool, identity: bytes, bind_host: str) -> None:
        self.name, self.metadata = identity.hex(), b"m"
        self.pool, self.identity = region_of(pool), Region(1, IDENTITY_BYTES, 33, "DRAM", 0)
        self.proofs[self.name] = identity
        self._read = b""

    def add_remote(self, name: str, metadata: bytes, pool: Region, identity: Region) -> RemoteAgent:
        return RemoteAgent(name, 1, 2)

    def read_blocks(self, remote: RemoteAgent, remote_blocks: Indices, local_blocks: Indices) -> int:
        assert len(remote_blocks) == len(local_blocks)
        self.posts.append(len(local_blocks))
        return len(self.posts)

    def read_identity(self, remote: RemoteAgent, probe: int) -> int:
        self._read = self.proofs[remote.name]
        return 0

    def identity_read(self, probe: int) -> bytes:
        return self._read

    def is_done(self, handle: int) -> bool:
        return True

    def release(self, handle: int) -> None: ...

    def remove_remote(self, remote: RemoteAgent) -> None: ...

    def destroy(self) -> None: ...


@pytest.mark.parametrize(
    ("specs", "prefill", "decode", "num_posts"),
    [(HEADS, 1, 1, 2), (HEADS, 2, 2, 2), (HEADS, 4, 4, 2), (LATENTS, 1, 2, 1), (LATENTS, 4, 1, 1)],
)
def test_nixl_posts_a_request_for_32_mib_of_a_chunk_whatever_the_number_of_ranks(
    specs: Sequence[StateSpec], prefill: int, decode: int, num_posts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """59 MB of K and V, of which naive requests were 1,792 for each rank; 17 MB of latents. No block lies beside the
    next one.
    """
    monkeypatch.setattr(nixl, "NixlAgent", CountingAgent)
    monkeypatch.setattr(CountingAgent, "posts", [])
    whole, num_blocks = build_layout(specs, BLOCK_SIZE), 1 + 2 * NUM_BLOCKS
    sides = [RankedLayout(whole, num_parts(whole, ranks)) for ranks in (prefill, decode)]
    source, reader = (
        nixl.NixlTransport(
            MemoryPool(4096, side.page_bytes, side.num_ranks * num_blocks, "cpu", None, side.num_ranks),
            Identity(COMPATIBILITY, SECRET),
        )
        for side in sides
    )
    peer = reader.connect(source.card())
    blocks = [(block,) for block in range(1, num_blocks, 2)]
    for read in Resharding(sides[1], num_blocks, peer).reads([(0, i) for i in range(NUM_BLOCKS)], blocks, blocks):
        transfer = reader.read(peer, read.remote, read.local)
        assert transfer.wait(10)
        assert transfer.state is TransferState.DONE
    for each in (reader, source):
        each.close()
    posts, page_bytes = CountingAgent.posts, sides[1].page_bytes
    assert sum(posts) * page_bytes == NUM_BLOCKS * whole.page_bytes
    assert len(posts) == num_posts == math.ceil(sum(posts) / (nixl.PART_BYTES // page_bytes))
