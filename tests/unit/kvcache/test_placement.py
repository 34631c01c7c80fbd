"""Blocks of several pages: every byte of a state has one place, and published hybrids fill their pages."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.architecture.state import KVSpec, LatentSpec, RecurrentSpec, StateSpec
from tandem.kvcache.placement import BlockPlacement, Pieces, pieces_of, segment_places
from tandem.kvcache.ranked_layout import RankedLayout
from tandem.kvcache.spec import build_layout
from tests.unit.architecture.test_published import READ, read

RECURRENT = {
    *(
        "FalconH1ForCausalLM",
        "GraniteMoeHybridForCausalLM",
        "JambaForCausalLM",
        "KimiLinearForCausalLM",
        "Mamba2ForCausalLM",
    ),
    *("Lfm2ForCausalLM", "Lfm2MoeForCausalLM", "NemotronHForCausalLM", "Qwen3NextForCausalLM"),
    *("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
    *("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
}
HYBRIDS = sorted(
    name
    for name, checkpoint in READ.items()
    if RECURRENT & {*checkpoint.config["architectures"]} and name != "ibm-granite/granite-4.0-micro"
)
"""By name: to read a hundred configurations takes seconds, and each process of a run collects this file."""
LEAST_FILL = 0.98


@st.composite
def recurrent_specs(draw: st.DrawFn) -> RecurrentSpec:
    """With matrices or without; divided by ranks or not."""
    heads, groups, rows, size = (draw(st.integers(1, each)) for each in (9, 3, 5, 7))
    parts = ((groups, size), (groups, size), (heads, rows)) if draw(st.booleans()) else ()
    channels = 2 * groups * size + heads * rows
    return RecurrentSpec(channels, draw(st.integers(1, 3)), "bfloat16", (heads, rows, size) if parts else (), parts)


def spans_of(placement: BlockPlacement) -> list[tuple[int, int, int]]:
    """(page, start, end) of every piece."""
    found = []
    for kind, pieces in enumerate(placement.pieces):
        for layer in range(placement.num_layers):
            for number in range(pieces.count):
                place = placement.place(kind, layer, number)
                found.append((place.page, place.start, place.start + pieces.num_bytes))
    return found


@given(
    pieces=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 40)), min_size=1, max_size=3),
    num_layers=st.integers(1, 5),
    page_bytes=st.integers(40, 200),
)
def test_pieces_lie_in_one_page_each_and_pages_have_no_gaps(
    pieces: list[tuple[int, int]], num_layers: int, page_bytes: int
) -> None:
    placement = BlockPlacement(tuple(Pieces(*each) for each in pieces), num_layers, page_bytes)
    ends, spans = [0] * placement.num_pages, spans_of(placement)
    for page, start, end in spans:
        assert start == ends[page]
        assert end <= page_bytes
        ends[page] = end
    assert spans == sorted(spans)
    assert [placement.used_bytes(page) for page in range(placement.num_pages)] == ends
    assert all(ends)
    runs = [(kind, place, count) for kind in range(len(pieces)) for place, count in placement.runs(kind)]
    assert sum(count * pieces[kind][1] for kind, _, count in runs) == sum(ends)
    for kind, place, count in runs:
        assert count <= (page_bytes - place.start) // pieces[kind][1]


@given(
    states=st.lists(st.tuples(recurrent_specs(), st.integers(1, 4)), min_size=1, max_size=2, unique_by=lambda x: x[0]),
    growing=st.sampled_from([[], [KVSpec(2, 4, "bfloat16")] * 3, [LatentSpec(5, 3, "bfloat16")] * 2]),
)
def test_a_block_has_all_of_the_state_once(states: list[tuple[RecurrentSpec, int]], growing: list[StateSpec]) -> None:
    specs = [*growing, *(spec for spec, count in states for _ in range(count))]
    layout = build_layout(specs, 8)
    assert sorted(layer for group in layout.groups for layer in group.layers) == list(range(len(specs)))
    for number, group in enumerate(layout.groups):
        placement = layout.placement(number)
        assert placement.num_pages == group.pages_per_block
        num_bytes = sum(end - start for _, start, end in spans_of(placement))
        assert num_bytes == len(group.layers) * group.spec.block_bytes(8)
        assert max(end for _, _, end in spans_of(placement)) <= layout.page_bytes
        segments = group.spec.segments(8)
        sizes = [pieces.count * pieces.num_bytes for pieces in pieces_of(group.spec, 8)]
        assert [kind for kind, _ in segment_places(segments)][-1] == len(sizes) - 1
        assert sum(segment.num_bytes for segment in segments) == sum(sizes)
    assert layout.bytes_per_request == layout.page_bytes * sum(
        group.pages_per_block for group in layout.groups if group.spec.is_constant
    )


def test_hybrids_are_all_that_keep_a_state_of_one_size() -> None:
    found = (name for name in READ if any(spec.is_constant for spec in read(READ[name].config).kv_specs))
    assert sorted(found) == HYBRIDS


@pytest.mark.parametrize("name", HYBRIDS)
def test_published_hybrids_fill_their_pages(name: str) -> None:
    """With K and V of a long request, and the state nearly so: at most a fifth more and a page."""
    specs = replace(read(READ[name].config), dtype="bfloat16").kv_specs
    layout = build_layout(specs, 16)
    assert layout.fill >= LEAST_FILL
    state = sum(spec.bytes_per_request for spec in specs)
    assert state <= layout.bytes_per_request <= 1.2 * state + layout.page_bytes
    for num_ranks in (2, 4, 8):
        ranked = RankedLayout(layout, num_ranks).layout
        assert ranked.fill >= 0.5
        state = sum(spec.shard(num_ranks).bytes_per_request for spec in specs)
        assert state <= ranked.bytes_per_request <= 1.6 * state + ranked.page_bytes
