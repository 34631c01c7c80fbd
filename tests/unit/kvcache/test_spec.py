import math
from dataclasses import replace

import pytest

from tandem.architecture.state import KVSpec, RecurrentSpec
from tandem.core.errors import ConfigurationError
from tandem.kvcache.spec import KVLayout, build_layout
from tests.helpers.layouts import layout_of

LOCAL = KVSpec(num_kv_heads=2, head_dim=8, dtype="bfloat16", window=4)
GLOBAL = KVSpec(num_kv_heads=4, head_dim=16, dtype="float32")


def test_bytes_count_keys_and_values() -> None:
    assert LOCAL.bytes_per_token == 2 * 2 * 8 * 2
    assert GLOBAL.bytes_per_token == 2 * 4 * 16 * 4


@pytest.mark.parametrize(("window", "position", "first"), [(None, 9, 0), (4, 2, 0), (4, 3, 0), (4, 4, 1), (1, 5, 5)])
def test_a_window_counts_the_query_itself(window: int | None, position: int, first: int) -> None:
    assert KVSpec(1, 8, "float32", window).needed(position) == first


def test_groups_are_as_large_as_the_rarest_spec_and_full_attention_comes_first() -> None:
    local = replace(GLOBAL, window=4)
    specs = [GLOBAL if layer % 6 == 5 else local for layer in range(24)] + [local, local]
    layout = build_layout(specs, 16)
    assert [len(group.layers) for group in layout.groups] == [4, 4, 4, 4, 4, 4, 2]
    assert layout.groups[0].spec == GLOBAL
    assert layout.num_layers == 26
    assert sorted(layer for group in layout.groups for layer in group.layers) == list(range(26))
    for layer, spec in enumerate(specs):
        group, index = layout.group_of_layer(layer)
        assert layout.groups[group].spec == spec
        assert layout.groups[group].layers[index] == layer


def test_any_block_can_serve_any_group() -> None:
    layout = build_layout([LOCAL, LOCAL, GLOBAL, GLOBAL], 16)
    assert layout.page_bytes == GLOBAL.bytes_per_token * 16
    assert [group.layers for group in layout.groups] == [(2,), (3,), (0, 1)]


@pytest.mark.parametrize(
    ("local", "heads", "num_local", "num_global", "sizes"),
    [
        ((1, 256), (1, 512), 12, 3, [3, 6, 6]),  # Gemma 4 E2B, of its layers that keep state
        ((2, 256), (2, 512), 20, 4, [4, 8, 8, 4]),  # E4B
        ((8, 256), (2, 512), 25, 5, [5, *[2] * 12, 1]),  # 26B-A4B: a global layer is half as large as a local one
        ((16, 256), (4, 512), 50, 10, [10, *[5] * 10]),  # 31B
        ((4, 128), (4, 128), 3, 21, [7, 7, 7, 3]),
        ((1, 8), (1, 512), 1, 1, [1, 1]),
    ],
)
def test_pages_of_layers_of_two_sizes_are_nearly_full(
    local: tuple[int, int], heads: tuple[int, int], num_local: int, num_global: int, sizes: list[int]
) -> None:
    """Those of layers without a window are as full as can be: of a long context they are what is kept."""
    small, large = KVSpec(*local, "bfloat16", window=512), KVSpec(*heads, "bfloat16")
    layout = build_layout([small] * num_local + [large] * num_global, 16)
    assert [len(group.layers) for group in layout.groups] == sizes
    full = [group for group in layout.groups if group.spec == large]
    assert layout.page_bytes * len(full) == large.bytes_per_token * num_global * 16
    assert layout.page_bytes * len(layout.groups) >= 16 * sum(
        spec.bytes_per_token * count for spec, count in ((small, num_local), (large, num_global))
    )


def test_an_unknown_layer_and_an_unserved_block_size_are_named() -> None:
    with pytest.raises(KeyError, match="9"):
        build_layout([GLOBAL], 16).group_of_layer(9)
    with pytest.raises(ConfigurationError, match="block_size=12"):
        build_layout([GLOBAL], 12)


@pytest.mark.parametrize("window", [1, 3, 4, 5, 9])
@pytest.mark.parametrize("chunk", [1, 4, 7])
def test_a_windowed_group_never_needs_more_than_is_counted(window: int, chunk: int) -> None:
    layout = layout_of(window)
    size, num_tokens = layout.block_size, 60
    needed = max(
        math.ceil(min(start + chunk, num_tokens) / size) - max(0, start - window + 1) // size
        for start in range(num_tokens)
    )
    assert needed <= layout.blocks_for(num_tokens, chunk) <= needed + 2
    assert all(layout.blocks_for(n, chunk) <= math.ceil(n / size) for n in range(1, 60))


def test_groups_add_up() -> None:
    layout: KVLayout = layout_of(None, None, 5)
    assert layout.blocks_for(40, 4) == 10 + 10 + 3


def test_a_hand_off_takes_pages_of_constant_states_once() -> None:
    """And nothing of a window for each further block."""
    state = RecurrentSpec(channels=8, columns=3, dtype="float32", heads=(2, 16, 16))
    layout = build_layout([GLOBAL, state, state, replace(GLOBAL, window=8)], 8)
    (state_group,) = (group for group in layout.groups if group.spec == state)
    assert state_group.pages_per_block > 1
    assert layout.bytes_per_request == state_group.pages_per_block * layout.page_bytes
    assert layout.bytes_per_block == layout.page_bytes
    assert layout_of(4).bytes_per_block == layout_of(4).page_bytes
    assert layout_of(None, 4).bytes_per_request == 0
    assert build_layout([state], 8).bytes_per_block == 0


def test_pages_are_room_for_more_tokens_where_no_layer_keeps_all() -> None:
    state = RecurrentSpec(channels=8, columns=3, dtype="float32", heads=(2, 16, 16))
    constant = build_layout([state], 8)
    num_needed = constant.blocks_for(8000, 16)
    assert constant.token_blocks(5 * num_needed, 8000, 16) == 5 * 1000
    assert layout_of(8).token_blocks(12, 400, 4) == 12 * 400 // (4 * layout_of(8).blocks_for(400, 4))
    assert build_layout([GLOBAL, state], 8).token_blocks(300, 8000, 16) == 300
