"""In how many requests and pieces a chunk of a prompt moves between workers of any widths, counted exactly.

The naive count is a request for each layer, of K and of V, each block, and each range of heads that one rank of the
source has for one of the reader.
"""

from collections.abc import Sequence

import pytest

from tandem.architecture.state import KVSpec, LatentSpec, StateSpec
from tandem.kvcache.ranked_layout import RankedLayout, num_parts
from tandem.kvcache.spec import build_layout
from tandem.transport.base import Peer
from tandem.transport.blocks import plan_read
from tandem.transport.reshard import Resharding

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
