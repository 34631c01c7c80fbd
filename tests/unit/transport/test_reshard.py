"""Blocks read between workers of any widths: every rank gets its heads, of the blocks that were asked for."""

from collections.abc import Iterable, Sequence
from itertools import accumulate, islice, pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tandem.architecture.state import KVSpec, LatentSpec, RecurrentSpec, StateSpec
from tandem.core.errors import IncompatiblePeerError, TransportError
from tandem.kvcache.placement import segment_places
from tandem.kvcache.ranked_layout import RankedLayout
from tandem.kvcache.spec import KVLayout, build_layout
from tandem.transport.base import Peer
from tandem.transport.reshard import Entry, Resharding

WIDTHS = (1, 2, 4)
STAGED = ((1, (1, 2)), ((1, 2), 1), ((2, 2), (1, 2)), (4, (2, 2)), ((2, 2), 4), ((2, 2), (2, 2)), ((1, 2), 2))
BLOCK_SIZE = 8
Side = int | tuple[int, int]
Pages = NDArray[np.uint8]  # [num_ranks * num_blocks, page_bytes]
Places = tuple[int, ...]  # pages of one block


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
    "states of many pages": (
        *(RecurrentSpec(32, 3, "bfloat16", (8, 4, 2), ((8, 2), (2, 4), (2, 4))),) * 3,
        kv(4),
        kv(4),
    ),
    "a head for each channel": (*(RecurrentSpec(64, 3, "bfloat16", (64, 1, 3), ((64, 1),)),) * 3, kv(4), kv(4)),
    "heads of odd sizes": (*(RecurrentSpec(56, 3, "bfloat16", (8, 5, 2), ((8, 5), (4, 2), (4, 2))),) * 3, kv(4)),
    "latents beside": (LatentSpec(6, 2, "bfloat16"), LatentSpec(6, 2, "bfloat16")),
}


def blocks_of(
    ranked: RankedLayout, content: Iterable[tuple[int, int]], free: Iterable[int]
) -> dict[tuple[int, int], Places]:
    """Pages for these (group, index), in turn."""
    pages = iter(free)
    return {entry: tuple(islice(pages, ranked.pages_per_block(entry[0]))) for entry in content}


def pages_of(ranked: RankedLayout, num_blocks: int, content: dict[tuple[int, int], Places]) -> Pages:
    """Pages of ranks that have computed the blocks (group, index), which `content` places; others are zero."""
    pages = np.zeros((ranked.num_ranks, num_blocks, ranked.page_bytes), dtype=np.uint8)
    starts = [0, *accumulate(ranked.stages)]
    for ((group, index), block), rank in product(content.items(), range(ranked.num_ranks)):
        for at, layer in enumerate(ranked.layout_of(rank).groups[group].layers):
            specs = ranked.whole.groups[group].spec, ranked.layout.groups[group].spec
            segments = list(zip(*(spec.segments(BLOCK_SIZE) for spec in specs), strict=True))
            places = segment_places([own for _, own in segments])
            for number, (whole, own) in enumerate(segments):
                source = np.random.default_rng((group, index, starts[rank // ranked.width] + layer, number))
                numbers = source.integers(1, 256, (whole.num_heads, whole.head_bytes))
                first = rank % ranked.width * whole.num_heads // ranked.width
                kind, offset = places[number]
                for head, kept in enumerate(numbers[first : first + own.num_heads]):
                    piece, start = (head, 0) if own.is_cut else (0, offset + head * own.head_bytes)
                    place = ranked.layout_of(rank).placement(group).place(kind, at, piece)
                    start += place.start
                    assert not pages[rank, block[place.page], start : start + len(kept)].any(), "two have one place"
                    pages[rank, block[place.page], start : start + len(kept)] = kept
    return pages.reshape(-1, ranked.page_bytes)


def unit_of(reader: RankedLayout, source: RankedLayout) -> int:
    return reader.page_bytes if reader.parts == source.parts else reader.piece_bytes


def resharding_of(whole: KVLayout, readers: Side, sources: Side, sizes: tuple[int, int]) -> Resharding:
    reader, source = divided(whole, readers), divided(whole, sources)
    unit = unit_of(reader, source)
    num_units = source.num_ranks * sizes[1] * source.page_bytes // unit
    return Resharding(reader, sizes[0], Peer("tcp", "x", num_units, 1, unit, *source.parts))


def pulled(
    whole: KVLayout, readers: Side, sources: Side, entries: list[Entry], remote: Sequence[int], local: Sequence[int]
) -> tuple[Pages, Pages, int]:
    """(pages of the reader after its reads, as they should be, bytes moved). `remote`, `local`: pages to take in turn,
    all but the null block's.
    """
    reader, source = divided(whole, readers), divided(whole, sources)
    theirs_at, ours_at = blocks_of(source, entries, remote), blocks_of(reader, entries, local)
    sizes = len(local) + 1, len(remote) + 1
    theirs, expected = pages_of(source, sizes[1], theirs_at), pages_of(reader, sizes[0], ours_at)
    found = np.zeros_like(expected)
    reads = resharding_of(whole, readers, sources, sizes).reads(
        entries, [theirs_at[entry] for entry in entries], [ours_at[entry] for entry in entries]
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
    found, expected, num_bytes = pulled(whole, readers, sources, entries, range(150, 0, -1), range(1, 150))
    assert np.array_equal(found, expected)
    if readers != sources:
        parts = product((group for group, _ in entries), range(reader.num_ranks))
        missing = sum(sum(reader.used_bytes(group, rank)) for group, rank in parts)
        assert num_bytes == missing, "what was missing, no more"
    else:
        num_pages = sum(reader.pages_per_block(group) for group, _ in entries)
        assert num_bytes == num_pages * reader.page_bytes * reader.num_ranks


@given(
    readers=st.sampled_from((*WIDTHS, (1, 2), (2, 2))),
    sources=st.sampled_from((*WIDTHS, (1, 2), (2, 2))),
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
    entries = [(0, index) for index in sorted(indices)]
    found, expected, _ = pulled(build_layout((kv(heads),) * 2, BLOCK_SIZE), readers, sources, entries, remote, local)
    assert np.array_equal(found, expected)


@pytest.mark.parametrize(
    ("remote", "local", "words"), [(20, 1, "remote block 20"), (1, 0, "local block 0"), (0, 1, "re")]
)
@pytest.mark.parametrize("sources", [1, 2])
def test_blocks_of_the_next_rank_are_not_reached(remote: int, local: int, words: str, sources: int) -> None:
    with pytest.raises(TransportError, match=words):
        resharding_of(build_layout((kv(2),), BLOCK_SIZE), 2, sources, (12, 20)).reads([(0, 0)], [(remote,)], [(local,)])


def test_a_block_of_another_number_of_pages_is_refused() -> None:
    """As of a peer that says one thing in its greeting and another in a lease."""
    whole = build_layout(MODELS["states of many pages"], BLOCK_SIZE)
    assert whole.groups[1].pages_per_block > 2
    with pytest.raises(TransportError, match="remote block 3 of KV group 1 cannot be transferred: it has 2 pages"):
        resharding_of(whole, 1, 1, (99, 99)).reads([(1, 3)], [(1, 2)], [tuple(range(1, 99))])


def test_pages_of_any_content_move_between_equal_widths_only() -> None:
    whole = build_layout((kv(2),), BLOCK_SIZE)
    read = resharding_of(whole, 2, 2, (12, 20)).read_of_pages([3, 19], [11, 1])
    assert (list(read.remote), list(read.local)) == ([3, 19, 23, 39], [11, 1, 23, 13])
    with pytest.raises(TransportError, match="whole pages of 1 ranks mean nothing here"):
        resharding_of(whole, 2, 1, (12, 20)).read_of_pages([3], [1])
    for remote, local, words in ((20, 1, "remote block 20"), (0, 1, "remote block 0"), (1, 12, "local block 12")):
        with pytest.raises(TransportError, match=words):
            resharding_of(whole, 2, 2, (12, 20)).read_of_pages([remote], [local])


def test_a_pool_of_other_sizes_is_refused() -> None:
    reader = RankedLayout(build_layout((kv(2),), BLOCK_SIZE), 1)
    with pytest.raises(IncompatiblePeerError, match="not blocks of 64 bytes"):
        Resharding(reader, 12, Peer("tcp", "x", 81, 1, reader.piece_bytes, 2))


def test_widths_that_group_layers_in_another_way_are_known() -> None:
    """One head more in some layers: only those are halved, so that pages of another size are the best."""
    specs = (kv(1, 16),) * 6 + (kv(4),) * 2
    assert not RankedLayout(build_layout(specs, BLOCK_SIZE), 4).is_shared
