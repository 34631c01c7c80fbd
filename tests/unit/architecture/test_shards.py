"""Shards of models: together they have every number of a split tensor, and what cannot be split is refused by name."""

import random
import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tandem.architecture.fields import Fields
from tandem.architecture.model import ModelSpec
from tandem.architecture.registry import find_family
from tandem.architecture.shards import WIDTHS, head_bounds, shard_model
from tandem.architecture.tensors import Source
from tandem.core.errors import ConfigurationError
from tests.helpers.specs import attention_of
from tests.unit.architecture.published import CHECKPOINTS

SIZES: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
REPLICATED = ("norm.weight", "embed_tokens.weight", "o_proj.bias")


def read(config: dict[str, Any]) -> ModelSpec:
    fields = Fields(config, "config.json")
    return find_family(fields).read_model(fields)


def random_model(source: random.Random, kv_heads: int) -> ModelSpec:
    heads = kv_heads * source.choice((8, 16, 24))
    return read(
        SIZES
        | {
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "hidden_size": heads * source.choice((2, 4, 6)),
            "intermediate_size": 16 * source.randint(1, 9),
            "vocab_size": source.randint(128, 999),
        }
    )


def refusal(whole: ModelSpec, num_ranks: int) -> str | None:
    try:
        shard_model(whole, 0, num_ranks)
    except ConfigurationError as error:
        return str(error)
    return None


def cover(whole: ModelSpec, shards: list[ModelSpec]) -> dict[str, npt.NDArray[np.int64]]:
    """Number of shards that read each element of each tensor of the checkpoint."""
    counts: dict[str, npt.NDArray[np.int64]] = {}
    for tensor in whole.tensors():
        source = tensor.source or Source(tensor.name)
        rows = max(source.stop or tensor.shape[0], len(counts.get(source.tensor, ())))
        counts[source.tensor] = np.zeros((rows, *tensor.shape[1:]), dtype=np.int64)
    for shard in shards:
        for tensor in shard.tensors():
            source = tensor.source or Source(tensor.name)
            part = counts[source.tensor][source.start : source.stop : source.step]
            part = part if source.within is None else part[:, slice(*source.within)]
            assert part.shape == tensor.shape, tensor
            part += 1
    return counts


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("num_ranks", WIDTHS)
def test_every_number_is_read_by_one_rank_or_by_all_that_need_a_copy(kv_heads: int, num_ranks: int) -> None:
    whole = random_model(random.Random(kv_heads * 10 + num_ranks), kv_heads)
    shards = [shard_model(whole, rank, num_ranks) for rank in range(num_ranks)]
    for name, count in cover(whole, shards).items():
        copies = num_ranks if name.endswith(REPLICATED) else 1
        if ".k_proj." in name or ".v_proj." in name:
            copies = max(1, num_ranks // kv_heads)
        assert (count == copies).all(), name


@pytest.mark.parametrize("num_ranks", WIDTHS)
def test_a_shard_keeps_the_state_of_its_heads_and_a_part_of_each_sum(num_ranks: int) -> None:
    whole = random_model(random.Random(3), 2)
    shard = shard_model(whole, num_ranks - 1, num_ranks)
    kept, of_all = attention_of(shard)[0], attention_of(whole)[0]
    assert shard.kv_specs == tuple(spec.shard(num_ranks) for spec in whole.kv_specs)
    assert kept.num_kv_heads == max(1, of_all.num_kv_heads // num_ranks)
    assert kept.num_heads * num_ranks == of_all.num_heads
    partial = {tensor.name for tensor in shard.tensors() if tensor.is_partial}
    downs = {t.name for t in whole.tensors() if t.name.endswith(("o_proj.weight", "down_proj.weight"))}
    assert partial == (downs if num_ranks > 1 else set())
    assert all(tensor.sum_blocks == 8 // num_ranks for tensor in shard.tensors() if tensor.is_partial)


LATENTS: dict[str, Any] = SIZES | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "num_key_value_heads": 8,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
OF_HEADS = ("q_b_proj.weight", "kv_b_proj.weight", "self_attn.o_proj.weight")


def test_heads_of_latent_attention_are_split_and_the_latents_are_not() -> None:
    whole = read(LATENTS)
    shards = [shard_model(whole, rank, 4) for rank in range(4)]
    counts = {name: count for name, count in cover(whole, shards).items() if ".self_attn." in name}
    assert len(counts) == 14
    for name, count in counts.items():
        assert (count == (1 if name.endswith(OF_HEADS) else 4)).all(), name
    assert {shard.kv_specs for shard in shards} == {whole.kv_specs}


MAMBA: dict[str, Any] = SIZES | {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    "layer_types": ["mamba", "attention"],
    "position_embedding_type": "nope",
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_d_head": 16,
    "shared_intermediate_size": 48,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
}


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_convolution_is_split_part_by_part(num_ranks: int) -> None:
    """Of fewer groups than ranks each has a copy; norms are whole on every rank."""
    whole = read(MAMBA)
    shards = [shard_model(whole, rank, num_ranks) for rank in range(num_ranks)]
    counts = {name: count for name, count in cover(whole, shards).items() if ".mamba." in name}
    inner, groups, copies = 128, 32, num_ranks // 2
    expected = {
        "in_proj.weight": [1] * 2 * inner + [copies] * 2 * groups + [1] * 8,
        "conv1d.weight": [1] * inner + [copies] * 2 * groups,
        "conv1d.bias": [1] * inner + [copies] * 2 * groups,
        "norm.weight": [num_ranks] * inner,
    }
    for name, count in counts.items():
        rows = expected.get(name.split(".mamba.")[1], [1] * len(count))
        assert [*count.reshape(len(count), -1).min(axis=1)] == [*count.reshape(len(count), -1).max(axis=1)] == rows
    assert len(counts) == 8
    assert {shard.kv_specs for shard in shards} == {tuple(spec.shard(num_ranks) for spec in whole.kv_specs)}


def test_rows_of_periods_are_those_of_whole_ones_or_of_one() -> None:
    """Three rows of each five: rows 6 to 11 are of periods 2 and 3, rows 7 and 8 of the third."""
    source = Source("a", start=1, stop=4, period=5)
    assert source.rows(6, 12) == replace(source, periods=(2, 4))
    assert source.rows(6, 12).rows(3, 6) == replace(source, periods=(3, 4))
    assert source.rows(7, 9) == replace(source, start=2, stop=4, periods=(2, 3))


def test_sinks_are_split_by_heads_and_a_norm_over_all_heads_says_which_elements_are_here() -> None:
    configs = {each.name: dict(each.config) for each in CHECKPOINTS}
    sinks, norms = (read(configs[name]) for name in ("openai/gpt-oss-20b", "allenai/OLMo-2-1124-7B"))
    split = [attention_of(shard_model(sinks, rank, 8))[0] for rank in range(8)]
    sources = [(m.sinks.shape, m.sinks.source.start, m.sinks.source.stop) for m in split if m.sinks and m.sinks.source]
    assert sources == [((8,), 8 * rank, 8 * rank + 8) for rank in range(8)]
    mixers = [attention_of(shard_model(norms, rank, 2))[0] for rank in range(2)]
    size = attention_of(norms)[0].num_heads * mixers[0].head_dim
    assert [(m.q_norm.size, m.q_norm.within) for m in mixers if m.q_norm is not None] == [
        (size, (0, size // 2)),
        (size, (size // 2, size)),
    ]


@pytest.mark.parametrize("vocab_size", [128, 129, 199, 32000, 151936])
def test_heads_begin_at_whole_strips_and_end_with_the_vocabulary(vocab_size: int) -> None:
    for num_ranks in WIDTHS:
        bounds = head_bounds(vocab_size, num_ranks)
        assert bounds[0] == 0
        assert bounds[-1] == vocab_size
        assert all(first < end and first % 16 == 0 for first, end in pairwise(bounds))


@pytest.mark.parametrize(
    ("options", "num_ranks", "words"),
    [
        ({}, 3, "tp=3 is no number of ranks; choose one of 1, 2, 4, 8"),
        ({}, 16, "tp=16 is no number of ranks"),
        ({"num_attention_heads": 6, "hidden_size": 96}, 4, r"num_attention_heads=6, which 4 .* had: tp=1, 2$"),
        ({"num_attention_heads": 12, "num_key_value_heads": 3, "hidden_size": 96}, 2, "num_key_value_heads=3, which 2"),
        ({"intermediate_size": 100}, 4, r"layer 0 has 100 inputs of .*mlp.down_proj, which 4"),
        ({"vocab_size": 31}, 2, "vocab_size=31, fewer than 16 tokens a rank"),
    ],
)
def test_a_width_that_does_not_divide_is_refused_with_those_that_do(
    options: dict[str, Any], num_ranks: int, words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        shard_model(read(SIZES | options), 0, num_ranks)


def test_published_dense_models_are_split_or_refused_by_name() -> None:
    """Two ranks have the weights between them, or the message names the layer and the reason."""
    split = set()
    for checkpoint in (each for each in CHECKPOINTS if each.refused is None and each.active is None):
        whole = read(dict(checkpoint.config))
        words = refusal(whole, 2)
        if words is not None:
            assert re.search(r"tp=2 cannot serve this .*: layer \d+ has .*; what can be had: tp=1", words), words
            continue
        shards = [shard_model(whole, rank, 2) for rank in (0, 1)]
        split.add(whole.family)
        sizes = [sum(tensor.size for tensor in shard.tensors() if tensor.is_weight) for shard in shards]
        least = sum(tensor.size for tensor in whole.tensors() if tensor.is_weight)
        assert whole.head is not None
        assert least <= sum(sizes) <= 1.2 * least + 2 * whole.head.size, checkpoint.name
    assert {"llama", "qwen2", "qwen3", "mistral", "olmo2", "olmo3", "phi3"} <= split
