import math
from dataclasses import replace

import pytest

from tandem.architecture.state import KVSpec, Plane, RecurrentSpec

FULL, SLIDING = KVSpec(2, 8, "bfloat16"), KVSpec(2, 8, "bfloat16", window=5)


def test_k_and_v_are_two_planes_with_tokens_inside_each_head() -> None:
    keys, values = FULL.planes
    assert (keys.name, values.name) == ("k", "v")
    assert keys.block_shape(16) == values.block_shape(16) == (2, 16, 8)
    assert keys.block_bytes(16) == 2 * 16 * 8 * 2
    assert FULL.block_bytes(16) == 16 * FULL.bytes_per_token == 2 * keys.block_bytes(16)
    assert FULL.can_rewind


def test_a_plane_without_a_token_axis_is_as_large_in_any_block() -> None:
    plane = Plane("state", (3, 4), "float32", token_axis=None)
    assert plane.block_shape(16) == plane.block_shape(64) == (3, 4)
    assert plane.block_bytes(16) == plane.num_bytes == 48


@pytest.mark.parametrize(("spec", "is_bounded"), [(FULL, False), (SLIDING, True)])
def test_a_request_keeps_what_its_next_query_sees(spec: KVSpec, is_bounded: bool) -> None:
    assert spec.is_bounded == is_bounded
    for num_tokens in range(12):
        num_seen = min(num_tokens, 5) if is_bounded else num_tokens
        assert spec.bytes(num_tokens) == num_seen * spec.bytes_per_token


@pytest.mark.parametrize("window", [None, 1, 4, 5, 17])
@pytest.mark.parametrize("chunk", [1, 6, 40])
def test_most_blocks_are_those_of_the_window_and_a_chunk(window: int | None, chunk: int) -> None:
    spec = KVSpec(1, 8, "float32", window)
    for num_tokens in range(1, 80):
        whole = math.ceil(num_tokens / 4)
        expected = whole if window is None else min(whole, math.ceil((window - 1 + chunk) / 4) + 1)
        assert spec.most_blocks(num_tokens, chunk, 4) == expected


def test_specs_that_differ_have_different_words() -> None:
    """The handshake compares these."""
    specs = [FULL, SLIDING, KVSpec(4, 8, "bfloat16"), KVSpec(2, 16, "bfloat16"), KVSpec(2, 8, "float16")]
    assert len({str(spec) for spec in specs}) == len(set(specs)) == 5
    assert str(SLIDING) == "2 heads x 8 bfloat16 window 5"


def test_a_recurrent_state_is_divided_by_heads_and_each_column_part_by_part() -> None:
    """Of two groups of keys, which four ranks have one each of; the convolution's inputs lie column by column."""
    whole = RecurrentSpec(40, 2, "bfloat16", (4, 6, 4), ((2, 4), (2, 4), (4, 6)))
    part = whole.shard(4)
    assert part == RecurrentSpec(14, 2, "bfloat16", (1, 6, 4), ((1, 4), (1, 4), (1, 6)))
    assert [(each.num_heads, each.head_bytes) for each in whole.segments(16)] == [
        (4, 96),
        *[(2, 8), (2, 8), (4, 12)] * 2,
    ]
    for spec in (whole, part):
        assert sum(each.num_heads * each.head_bytes for each in spec.segments(16)) == spec.block_bytes(16)
    undivided = replace(whole, parts=())
    assert undivided.shard(4) == undivided
    assert [each.num_heads for each in undivided.segments(16)] == [1, 1]
