"""Pieces in which workers of different divisions read each other's pages: whole ones between all divisions, and so
large that a pool of any usual size has few enough.
"""

import math
from dataclasses import replace
from functools import cache
from itertools import pairwise, product

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tandem.architecture.shards import WIDTHS
from tandem.architecture.state import ChosenKVSpec, KVSpec, LatentSpec, RecurrentSpec, StateSpec
from tandem.kvcache.ranked_layout import RankedLayout
from tandem.kvcache.spec import KVLayout, build_layout
from tandem.transport.base import MemoryPool
from tests.unit.architecture.test_published import READ, read

GIB = 1 << 30
JAMBA, NEMOTRON_NANO_2 = "ai21labs/Jamba-v0.1", "nvidia/NVIDIA-Nemotron-Nano-9B-v2"
JOINT = {JAMBA: 64, NEMOTRON_NANO_2: 256}
"""Bytes of the pieces of published models whose heads are smaller than 128 bytes or leave a smaller rest."""


@cache
def whole_of(name: str) -> KVLayout:
    """Layout of a published model's state on one rank, cached because reading its configuration takes a while."""
    return build_layout(replace(read(READ[name].config), dtype="bfloat16").kv_specs, 16)


def can_divide(whole: KVLayout, width: int) -> bool:
    """Whether so many ranks hold equal parts of all heads, or copies: more than can serve the model."""
    counts = [part.num_heads for group in whole.groups for part in group.spec.segments(whole.block_size)]
    return all(count % width == 0 or width % count == 0 for count in counts)


def check_pieces(reader: RankedLayout, source: RankedLayout) -> None:
    """Every copy between the two begins and ends at a piece on both sides, and so does every page."""
    assert reader.piece_bytes == source.piece_bytes
    for group in range(len(reader.whole.groups)):
        slices = reader.slices_from(source, group, range(1))
        copies = [copy for found in slices for copy in reader.copies_of(found, source, group)]
        assert copies
        bounds = {bound for copy in copies for bound in (copy.to.start, copy.start.start, copy.num_bytes)}
        assert not {bound for bound in bounds | {reader.page_bytes, source.page_bytes} if bound % reader.piece_bytes}


def attention(heads: int) -> st.SearchStrategy[StateSpec]:
    return st.sampled_from(
        (
            KVSpec(heads, 2, "bfloat16"),
            KVSpec(heads, 4, "float32", window=16),
            ChosenKVSpec(heads, 4, "bfloat16", index_dim=2),
            LatentSpec(5, 3, "bfloat16"),
        )
    )


@st.composite
def recurrent(draw: st.DrawFn) -> StateSpec:
    """A recurrence with heads and groups, channels that are heads of their own, or a convolution alone."""
    heads = draw(st.sampled_from((1, 2, 4, 8, 12, 24, 32)))
    columns, rows, size = (draw(st.integers(1, most)) for most in (3, 5, 6))
    parts = draw(
        st.sampled_from([((heads, 1),), ((heads, rows),)])
        | st.sampled_from((1, 2, 4, 8, heads)).map(lambda groups: ((groups, size), (groups, size), (heads, rows)))
    )
    matrices = draw(st.sampled_from([(), (heads, rows, size)]))
    return RecurrentSpec(sum(count * each for count, each in parts), columns, "bfloat16", matrices, parts)


@st.composite
def divisions(draw: st.DrawFn, whole: KVLayout) -> RankedLayout:
    width = draw(st.sampled_from([width for width in WIDTHS if can_divide(whole, width)]))
    cuts = draw(st.sets(st.integers(1, whole.num_layers - 1), max_size=2)) if whole.num_layers > 1 else set()
    stages = tuple(end - start for start, end in pairwise([0, *sorted(cuts), whole.num_layers]))
    return RankedLayout(whole, width * len(stages), stages if cuts else ())


@given(data=st.data(), kinds=st.lists(recurrent(), max_size=2), repeats=st.integers(1, 3))
def test_any_divisions_exchange_whole_pieces(data: st.DataObject, kinds: list[StateSpec], repeats: int) -> None:
    heads = data.draw(st.sampled_from((1, 2, 3, 4, 8, 12, 16, 40)))
    kinds += data.draw(st.lists(attention(heads), min_size=not kinds, max_size=2))
    whole = build_layout(kinds * repeats, 8)
    reader, source = data.draw(divisions(whole)), data.draw(divisions(whole))
    assume(reader.is_shared and source.is_shared)
    check_pieces(reader, source)


def stages_of(whole: KVLayout, num_stages: int) -> tuple[int, ...]:
    ends = [whole.num_layers * stage // num_stages for stage in range(num_stages + 1)]
    return tuple(end - start for start, end in pairwise(ends)) if num_stages > 1 else ()


@pytest.mark.parametrize("name", JOINT)
def test_all_sizes_of_workers_exchange_whole_pieces_of_published_models(name: str) -> None:
    whole = whole_of(name)
    sides = [RankedLayout(whole, width) for width in WIDTHS] + [RankedLayout(whole, 6, stages_of(whole, 3))]
    assert all(can_divide(side.whole, side.width) and side.is_shared for side in sides)
    for reader, source in product(sides, sides):
        check_pieces(reader, source)


@pytest.mark.parametrize("name", READ)
def test_pieces_of_published_models_are_those_of_one_head_unless_these_are_tiny(name: str) -> None:
    """So workers of earlier releases, whose cards of one rank do not state it, count in the same pieces."""
    whole = whole_of(name)
    one_head = math.gcd(*(part.head_bytes for group in whole.groups for part in group.spec.segments(16)))
    for width in filter(lambda width: can_divide(whole, width), WIDTHS):
        ranked = RankedLayout(whole, width)
        assert ranked.piece_bytes == JOINT.get(name, one_head)
        assert ranked.has_joint_pieces is (name in JOINT)
    assert (one_head < 128) is (name in JOINT)


def pool_of(ranked: RankedLayout, num_bytes: int) -> MemoryPool:
    num_blocks = num_bytes // ranked.page_bytes // ranked.num_ranks * ranked.num_ranks
    return MemoryPool(
        4096, ranked.page_bytes, num_blocks, "cpu", None, ranked.num_ranks, ranked.piece_bytes, ranked.stages
    )


@pytest.mark.parametrize("name", READ)
def test_every_published_model_can_have_a_large_pool(name: str) -> None:
    """Regression: Jamba's pool had to be below 4 GiB, in pieces of a channel, and Nemotron Nano 2's below 64 GiB."""
    ranked = RankedLayout(whole_of(name), 1)
    for size in (4, 8, 64, 127 if name == JAMBA else 250):
        assert pool_of(ranked, size * GIB).num_bytes > (size - 1) * GIB


@pytest.mark.parametrize("name", JOINT)
def test_ranks_and_stages_can_have_a_large_pool_too(name: str) -> None:
    whole = whole_of(name)
    pool = pool_of(RankedLayout(whole, 4, stages_of(whole, 2)), 127 * GIB)
    assert (pool.num_ranks, pool.num_bytes > 126 * GIB) == (4, True)
