"""Blocks read between workers of any widths: every rank gets its heads, of the blocks that were asked for."""

from itertools import accumulate, pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tandem.architecture.state import KVSpec, LatentSpec, RecurrentSpec, StateSpec
from tandem.core.errors import IncompatiblePeerError, TransportError
from tandem.kvcache.ranked_layout import RankedLayout
from tandem.kvcache.spec import KVLayout, build_layout
from tandem.transport.base import Peer
from tandem.transport.reshard import Entry, Resharding

WIDTHS = (1, 2, 4)
STAGED = ((1, (1, 2)), ((1, 2), 1), ((2, 2), (1, 2)), (4, (2, 2)), ((2, 2), 4), ((2, 2), (2, 2)), ((1, 2), 2))
BLOCK_SIZE = 8
Side = int | tuple[int, int]
Pages = NDArray[np.uint8]  # [num_ranks * num_blocks, page_bytes]


def divided(whole: KVLayout, side: Side) -> RankedLayout:
    """Ranks of each stage, and stages if there are several; the first has one layer less than the others."""
    if isinstance(side, int):
        return RankedLayout(whole, side)
    width, num_stages = side
    ends = [(whole.num_layers - 1) * stage // num_stages for stage in range(num_stages)] + [whole.num_layers]
    return RankedLayout(whole, width * num_stages, tuple(end - start for start, end in pairwise(ends)))


def kv(heads: int, window: int | None = None) -> KVSpec:
    return KVSpec(heads, 2, "bfloat16", window)


MODELS: dict[str, tuple[StateSpec, ...]] = {
    "one kind": (kv(4),) * 3,
    "one head": (kv(1),) * 2,
    "twelve heads": (kv(12),) * 2,
    "windows between": (kv(2, 16), kv(2, 16), kv(2), kv(2, 16), kv(2, 16), kv(2)),
    "two sizes": (kv(4, 16), KVSpec(4, 4, "bfloat16"), kv(4, 16)),
    "states beside": (RecurrentSpec(32, 3, "bfloat16", (4, 4, 2), ((4, 4), (2, 4), (2, 4))), kv(4), kv(4)),
    "latents beside": (LatentSpec(6, 2, "bfloat16"), LatentSpec(6, 2, "bfloat16")),
}


def pages_of(ranked: RankedLayout, num_blocks: int, content: dict[tuple[int, int], int]) -> Pages:
    """What ranks hold that have computed the blocks (group, block id) -> index; other blocks are zero."""
    pages = np.zeros((ranked.num_ranks, num_blocks, ranked.page_bytes), dtype=np.uint8)
    ends = [0, *accumulate(ranked.stages or (ranked.whole.num_layers,))]
    for (group, block), index in content.items():
        for rank in range(ranked.num_ranks):
            at = 0
            stage = range(ends[rank // ranked.width], ends[rank // ranked.width + 1])
            for layer in (layer for layer in ranked.layout.groups[group].layers if layer in stage):
                specs = ranked.whole.groups[group].spec, ranked.layout.groups[group].spec
                segments = zip(*(spec.segments(BLOCK_SIZE) for spec in specs), strict=True)
                for number, (whole, own) in enumerate(segments):
                    source = np.random.default_rng((group, index, layer, number))
                    numbers = source.integers(1, 256, (whole.num_heads, whole.head_bytes))
                    first = rank % ranked.width * whole.num_heads // ranked.width
                    kept = numbers[first : first + own.num_heads].ravel()
                    pages[rank, block, at : at + len(kept)] = kept
                    at += len(kept)
    return pages.reshape(-1, ranked.page_bytes)


def unit_of(reader: RankedLayout, source: RankedLayout) -> int:
    return reader.page_bytes if reader.parts == source.parts else reader.piece_bytes


def resharding_of(whole: KVLayout, readers: Side, sources: Side, sizes: tuple[int, int]) -> Resharding:
    reader, source = divided(whole, readers), divided(whole, sources)
    unit = unit_of(reader, source)
    num_units = source.num_ranks * sizes[1] * source.page_bytes // unit
    return Resharding(reader, sizes[0], Peer("tcp", "x", num_units, 1, unit, *source.parts))


def pulled(
    whole: KVLayout,
    readers: Side,
    sources: Side,
    moves: dict[Entry, tuple[int, int]],
    sizes: tuple[int, int] = (12, 20),
) -> tuple[Pages, Pages, int]:
    """(pages of the reader after its reads, as they should be, bytes moved)."""
    reader, source = divided(whole, readers), divided(whole, sources)
    theirs = pages_of(source, sizes[1], {(group, remote): index for (group, index), (remote, _) in moves.items()})
    expected = pages_of(reader, sizes[0], {(group, local): index for (group, index), (_, local) in moves.items()})
    entries, found = sorted(moves), np.zeros_like(expected)
    reads = resharding_of(whole, readers, sources, sizes).reads(
        entries, [moves[entry][0] for entry in entries], [moves[entry][1] for entry in entries]
    )
    unit = unit_of(reader, source)
    for read in reads:
        assert len(np.unique(read.remote)) == len(read.remote), "a transport refuses what is named twice"
        assert len(np.unique(read.local)) == len(read.local)
        found.reshape(-1, unit)[read.local] = theirs.reshape(-1, unit)[read.remote]
    return found, expected, sum(len(read.local) for read in reads) * unit


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("readers", "sources"), [*product(WIDTHS, WIDTHS), *STAGED])
def test_every_rank_gets_its_heads(name: str, readers: Side, sources: Side) -> None:
    whole = build_layout(MODELS[name], BLOCK_SIZE)
    reader = divided(whole, readers)
    assert reader.is_shared
    assert divided(whole, sources).is_shared
    entries = [(group, index) for group in range(len(whole.groups)) for index in (3, 4, 6)]
    moves = {entry: (19 - 2 * number, 1 + number) for number, entry in enumerate(entries)}
    found, expected, num_bytes = pulled(whole, readers, sources, moves)
    assert np.array_equal(found, expected)
    if readers != sources:
        ranks = range(reader.num_ranks)
        missing = sum(reader.used_bytes(group, rank) for group, _ in moves for rank in ranks)
        assert num_bytes == missing, "what was missing, no more"
    else:
        assert num_bytes == len(moves) * reader.page_bytes * reader.num_ranks


@given(
    readers=st.sampled_from(WIDTHS),
    sources=st.sampled_from(WIDTHS),
    heads=st.sampled_from((1, 2, 4, 8)),
    indices=st.sets(st.integers(0, 40), min_size=1, max_size=9),
    data=st.data(),
)
def test_any_blocks_in_any_places(
    readers: Side, sources: Side, heads: int, indices: set[int], data: st.DataObject
) -> None:
    """As where the beginning of a prompt is held already, and blocks of both sides are scattered."""
    local = data.draw(st.permutations(range(1, 12)))
    remote = data.draw(st.permutations(range(1, 20)))
    moves = {(0, index): (remote[i], local[i]) for i, index in enumerate(sorted(indices))}
    found, expected, _ = pulled(build_layout((kv(heads),) * 2, BLOCK_SIZE), readers, sources, moves)
    assert np.array_equal(found, expected)


@pytest.mark.parametrize(
    ("remote", "local", "words"), [(20, 1, "remote block 20"), (1, 0, "local block 0"), (0, 1, "re")]
)
@pytest.mark.parametrize("sources", [1, 2])
def test_blocks_of_the_next_rank_are_not_reached(remote: int, local: int, words: str, sources: int) -> None:
    with pytest.raises(TransportError, match=words):
        resharding_of(build_layout((kv(2),), BLOCK_SIZE), 2, sources, (12, 20)).reads([(0, 0)], [remote], [local])


def test_a_pool_of_other_sizes_is_refused() -> None:
    reader = RankedLayout(build_layout((kv(2),), BLOCK_SIZE), 1)
    with pytest.raises(IncompatiblePeerError, match="not blocks of 64 bytes"):
        Resharding(reader, 12, Peer("tcp", "x", 81, 1, reader.piece_bytes, 2))


def test_widths_that_group_layers_in_another_way_are_known() -> None:
    """One head more in some layers: only those are halved, so that pages of another size are the best."""
    specs = (kv(1, 16),) * 6 + (kv(4),) * 2
    assert not RankedLayout(build_layout(specs, BLOCK_SIZE), 4).is_shared
