"""Layouts of stages: one block table for all, and memory in proportion to their layers."""

import pytest

from tandem.architecture.state import KVSpec, RecurrentSpec, StateSpec
from tandem.kvcache.ranked_layout import RankedLayout
from tandem.kvcache.spec import build_layout
from tandem.kvcache.stage_layouts import stage_layouts

KV = KVSpec(4, 8, "bfloat16", None)
STATE = RecurrentSpec(32, 3, "bfloat16", (8, 16, 8), ((8, 2), (2, 4), (2, 4)))


@pytest.mark.parametrize(
    ("specs", "spans", "share"),
    [
        ((KV,) * 4, (range(2), range(2, 4)), 0.5),
        ((KV,) * 3, (range(1), range(1, 3)), 2 / 3),
        ((STATE, KV, STATE, KV), (range(2), range(2, 4)), 0.5),
        ((STATE, STATE, KV, KV), (range(2), range(2, 4)), 1.0),
    ],
)
def test_pages_hold_the_stage_with_most_layers(
    specs: tuple[StateSpec, ...], spans: tuple[range, ...], share: float
) -> None:
    whole = build_layout(specs, 8)
    layouts = stage_layouts(whole, spans)
    assert {layout.page_bytes for layout in layouts} == {whole.page_bytes * share}
    assert len({tuple(group.pages_per_block for group in layout.groups) for layout in layouts}) == 1
    for layout in layouts:
        assert all(
            layout.placement(group).num_pages <= found.pages_per_block for group, found in enumerate(layout.groups)
        )


def test_a_stage_without_layers_of_a_group_uses_nothing_of_its_blocks() -> None:
    ranked = RankedLayout(build_layout((STATE, STATE, KV, KV), 8), 2, (2, 2))
    states, growing = sorted(range(2), key=lambda group: not ranked.whole.groups[group].spec.is_constant)
    assert [any(ranked.used_bytes(states, rank)) for rank in range(2)] == [True, False]
    assert [any(ranked.used_bytes(growing, rank)) for rank in range(2)] == [False, True]
    assert len(ranked.used_bytes(states, 1)) == ranked.pages_per_block(states) > 1
