"""Attention to rows and entries in configurations: what is read, kept, refused and divided, and what it costs."""

import math
from dataclasses import replace
from typing import Any

import pytest

from tandem.architecture.cost import ModelCost
from tandem.architecture.entry_mixers import EntryAttentionSpec, SharedRowAttentionSpec
from tandem.architecture.entry_states import EntriesSpec, EntryInputsSpec, RowsSpec
from tandem.architecture.families import base
from tandem.architecture.families.compressed_mixers import read_mixers
from tandem.architecture.fields import Fields
from tandem.architecture.mixer_shards import split_mixer
from tandem.architecture.model import ModelSpec
from tandem.architecture.rope import Unscaled, YarnScaling
from tandem.architecture.split import IndivisibleError, RankPart
from tandem.core.errors import CheckpointError

PUBLISHED: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 2048,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "vocab_size": 129_280,
    "max_position_embeddings": 1_048_576,
    "rms_norm_eps": 1e-6,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "sliding_window": 128,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
    "compress_rope_theta": 160_000,
    "rope_theta": 10_000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65_536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
}
SLIDING, CHOSEN, ALL = 0, 2, 3
ROW, KEY = 2 * 512, 2 * 128  # bytes


def mixers(**changes: Any) -> list[SharedRowAttentionSpec]:
    fields = Fields({**PUBLISHED, **changes}, "config.json")
    return read_mixers(fields, base.read_sizes(fields, base.Defaults(max_positions=1 << 20)))


def cost_of(found: list[SharedRowAttentionSpec]) -> ModelCost:
    """Of a model of these mixers in the body of Llama."""
    fields = Fields(PUBLISHED, "config.json")
    sizes = base.read_sizes(fields, base.Defaults(max_positions=1 << 20, eos_token_id=1))
    layers = [base.pre_norm_layer(sizes, index, mixer) for index, mixer in enumerate(found)]
    model: ModelSpec = base.build_model("llama", fields, sizes, layers)
    return ModelCost("entries", model)


def test_each_kind_of_layer_keeps_its_states() -> None:
    rows, parts, keys = (
        RowsSpec(512, "bfloat16", 128),
        EntryInputsSpec(1024, "bfloat16", 4, 2),
        EntryInputsSpec(256, "bfloat16", 4, 2),
    )
    found = mixers()
    assert found[SLIDING].states("bfloat16") == (rows,)
    of_chosen = EntriesSpec(512, "bfloat16", 4, 128)
    assert found[CHOSEN].states("bfloat16") == (rows, of_chosen, parts, parts, keys, keys)
    of_all, whole_spans = EntriesSpec(512, "bfloat16", 128), EntryInputsSpec(512, "bfloat16", 128, 1)
    assert found[ALL].states("bfloat16") == (rows, of_all, whole_spans, whole_spans)
    assert str(rows) == "rows of 512 bfloat16, window 128"
    assert str(of_chosen) == "entries of 512 bfloat16 of each 4 tokens, index key 128"
    assert str(parts) == "parts of 1024 bfloat16, the last 2 spans of 4 tokens"
    assert (of_chosen.bytes_per_token, of_all.bytes_per_token) == ((ROW + KEY) / 4, ROW / 128)
    model = cost_of(found).model
    assert model.states_of_mixers[:4] == (((0,),), ((1,),), (tuple(range(2, 8)),), (tuple(range(8, 12)),))
    assert model.states_of_layer[CHOSEN] == tuple(range(2, 8))


def test_a_long_context_is_kept_and_read_in_a_small_part() -> None:
    cost, length = cost_of(mixers()), 1 << 20
    constant = 43 * 128 * ROW + 21 * 8 * 2 * 2 * (1024 + 256) + 20 * 128 * 2 * ROW
    assert cost.kv_bytes(length) == length * (21 * (ROW + KEY) / 4 + 20 * ROW / 128) + constant
    chosen, scanned, of_all = 21 * 512 * ROW, 21 * KEY * length / 4, 20 * ROW * length / 128
    made = 2 * 2 * (21 * (1024 + 256) + 20 * 512)
    assert cost.read_bytes(length) == 43 * 128 * ROW + chosen + scanned + of_all + made
    memory = cost.context_memory(length)
    assert [line.num_layers for line in memory] == [2, 21, 20]
    assert sum(line.held_bytes for line in memory) == cost.kv_bytes(length)
    assert sum(line.read_bytes for line in memory) == cost.read_bytes(length)
    assert memory[2].state == (
        "rows of 512 16-bit, window 128; entries of 512 16-bit of each 128 tokens; "
        "2 x parts of 512 16-bit, the last span of 128 tokens"
    )


@pytest.mark.parametrize(
    "spec",
    [EntryInputsSpec(8, "float32", 4, 2), EntryInputsSpec(8, "float32", 6, 1), EntryInputsSpec(8, "float32", 3, 2)],
)
def test_parts_are_needed_until_the_last_entry_that_is_made_of_them(spec: EntryInputsSpec) -> None:
    """Told naively: by the first token of every entry that a later query makes."""
    for position in range(40):
        ends = range(spec.span - 1, 60, spec.span)
        firsts = [max(0, end + 1 - spec.num_spans * spec.span) for end in ends if end >= position]
        assert spec.needed(position) == min(firsts)
        assert spec.bytes(position + 1) == 8 * 4 * (position + 1 - spec.needed(position))
    assert spec.most_seen(100) == max(position - spec.needed(position) for position in range(100))


@pytest.mark.parametrize("block_size", [8, 16, 128])
@pytest.mark.parametrize("span", [4, 10, 128])
def test_a_block_has_room_for_the_entries_that_end_in_it(span: int, block_size: int) -> None:
    spec = EntriesSpec(32, "float32", span, 16)
    most = max(
        sum((position + 1) % span == 0 for position in range(first, first + block_size))
        for first in range(0, 20 * block_size, block_size)
    )
    assert [plane.block_shape(block_size) for plane in spec.planes] == [(most, 32), (most, 16)]
    assert spec.block_bytes(block_size) == most * 48 * 4
    assert spec.bytes(3 * span + 1) == 3 * 48 * 4
    assert not spec.is_bounded
    assert spec.can_rewind


def test_published_and_newer_files_say_the_same() -> None:
    """Angles of sliding layers are not scaled; those of the others are, and not multiplied by a factor."""
    found = mixers()
    main, other = found[SLIDING].rope, found[CHOSEN].rope
    assert (main.theta, main.scaling, main.rotary_dim) == (10_000, Unscaled(), 64)
    assert (other.theta, other.attention_factor, other.rotary_dim) == (160_000, 1.0, 64)
    assert other.scaling == YarnScaling(16.0, 65_536, 32.0, 1.0, truncate=True)
    assert found[ALL].rope == other
    kinds = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
    yarn = {**PUBLISHED["rope_scaling"], "rope_type": "yarn", "rope_theta": 160_000, "attention_factor": 1.0}
    newer = {
        "compress_ratios": None,
        "layer_types": [kinds[ratio] for ratio in PUBLISHED["compress_ratios"][:43]],
        "compress_rates": {kinds[4]: 4, kinds[128]: 128},
        "rope_scaling": None,
        "rope_parameters": {"main": {"rope_type": "default", "rope_theta": 10_000}, "compress": yarn},
    }
    assert mixers(**newer) == found
    del yarn["attention_factor"]
    assert mixers(**newer)[CHOSEN].rope.attention_factor == pytest.approx(0.1 * math.log(16) + 1)
    without = {"main": {"rope_theta": 5_000.0}, "compress": {"rope_type": "default"}}
    assert mixers(**{**newer, "rope_parameters": without})[CHOSEN].rope.theta == 10_000  # as in transformers
    given = {**PUBLISHED["rope_scaling"], "attention_factor": 1.5}
    assert mixers(rope_scaling=given)[CHOSEN].rope.attention_factor == 1.5
    assert mixers(rope_parameters=newer["rope_parameters"]) == found  # as in transformers, the older description counts


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"num_key_value_heads": 2}, "num_key_value_heads=2 is not served; supported: 1"),
        ({"o_groups": 12}, "o_groups must be a divisor of num_attention_heads=64"),
        ({"compress_ratios": [0, 4]}, "compress_ratios must be a list of 0, 4 and 128"),
        ({"compress_ratios": [5] * 43}, "compress_ratios must be a list of 0, 4 and 128"),
        ({"index_head_dim": 32}, "index_head_dim must be even, and at least the 64 elements"),
        ({"layer_types": ["full_attention"] * 43}, "layer_types"),
        ({"compress_rates": {"other": 3}}, "other=3"),
        ({"rope_scaling": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor=0.25 is not served.*0.125"),
        ({"rope_scaling": {"main": {"rope_theta": 5.0}}}, "compress must be an object"),
        ({"rope_scaling": {"main": None, "compress": {"rope_theta": 5.0}}}, "main must be an object"),
    ],
)
def test_what_is_not_served_is_refused_by_name(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(CheckpointError, match=told):
        mixers(**changes)


@pytest.mark.parametrize("num_ranks", [2, 8])
def test_ranks_have_whole_groups_of_heads(num_ranks: int) -> None:
    whole = mixers()[CHOSEN]
    assert isinstance(whole, EntryAttentionSpec)
    parts = [split_mixer(whole, RankPart(rank, num_ranks, frozenset())) for rank in range(num_ranks)]
    groups = [part.o_groups for part in parts if isinstance(part, EntryAttentionSpec)]
    assert sum(groups, ()) == whole.o_groups
    for rank, part in enumerate(parts):
        assert isinstance(part, EntryAttentionSpec)
        assert (part.num_heads, part.o.inputs) == (64 // num_ranks, 8 * 1024 // num_ranks)
        assert (part.pool, part.indexer, part.kv, part.q_a) == (whole.pool, whole.indexer, whole.kv, whole.q_a)
        assert part.states("bfloat16") == whole.states("bfloat16")
        assert part.sinks.source is not None
        assert part.sinks.source.start == rank * 64 // num_ranks
    with pytest.raises(IndivisibleError, match="o_groups=4, which 8 ranks do not divide"):
        split_mixer(replace(whole, o_groups=whole.o_groups[:4]), RankPart(0, 8, frozenset()))
