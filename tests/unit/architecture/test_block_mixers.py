"""Attention to chosen blocks in configurations: what is read, what is refused, and what it costs."""

from dataclasses import replace
from typing import Any

import pytest

from tandem.architecture.block_mixers import BlockAttentionSpec, BlockChoice, CompressedAttentionSpec
from tandem.architecture.cost import ModelCost
from tandem.architecture.fields import Fields
from tandem.architecture.model import ModelSpec
from tandem.architecture.registry import find_family
from tandem.core.errors import CheckpointError, ConfigurationError
from tandem.quantize.inputs import shared_inputs
from tests.unit.architecture.published.mixtures import MINIMAX_M3

LLAMA = {
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
}
KV = 2 * 8 * 128  # numbers of K and V of a token


def read(model_type: str, **changes: Any) -> ModelSpec:
    if model_type != "minimax_m3":
        return parse({"model_type": model_type, **LLAMA, **changes})
    config = dict(MINIMAX_M3[0].config)
    return parse({**config, "text_config": {**config["text_config"], **changes}})


def parse(config: dict[str, Any]) -> ModelSpec:
    fields = Fields(config, "config.json")
    return find_family(fields).read_model(fields)


def test_minimax_m3_chooses_from_its_fourth_layer_on() -> None:
    model = read("minimax_m3")
    assert [isinstance(layer.mixer, BlockAttentionSpec) for layer in model.layers] == [False] * 3 + [True] * 57
    mixer = model.layers[3].mixer
    assert isinstance(mixer, BlockAttentionSpec)
    assert mixer.choice == BlockChoice(128, 16, num_first=0, num_last=1)
    assert mixer.rope is not None
    assert mixer.rope.rotary_dim == 64
    assert str(mixer.state("bfloat16")) == "4 heads x 128 bfloat16, of chosen blocks, index key 128"
    cost = ModelCost("m3", model)
    assert cost.read_bytes(32_768) == 2 * (3 * 1024 * 32_768 + 57 * (1024 * 2048 + 128 * 32_768))
    assert cost.read_bytes(32_769) == 2 * (3 * 1024 * 32_769 + 57 * (1024 * (15 * 128 + 1) + 128 * 32_769))


def test_moba_keeps_a_mean_of_each_16_keys() -> None:
    model = read("tandem_moba")
    mixer = model.layers[0].mixer
    assert isinstance(mixer, BlockAttentionSpec)
    assert mixer.choice == BlockChoice(4096, 12)
    state = mixer.state("bfloat16")
    assert str(state) == "8 heads x 128 bfloat16, of chosen blocks, means of each 16 tokens"
    assert state.bytes_per_token == 2 * (KV + 8 * 128 / 16)
    assert state.shard(2) == replace(state, num_kv_heads=4)
    assert ModelCost("moba", model).read_bytes(100 * 4096) == 32 * 2 * (KV * 12 * 4096 + 64 * 100 * 4096)


def test_nsa_reads_blocks_a_window_and_all_that_is_compressed() -> None:
    model = read("tandem_nsa")
    mixer = model.layers[0].mixer
    assert isinstance(mixer, CompressedAttentionSpec)
    assert mixer.choice == BlockChoice(64, 16, num_first=1, num_last=2)
    assert mixer.state("bfloat16").bytes_per_token == 2 * KV * 17 / 16
    cost = ModelCost("nsa", model)
    assert cost.read_bytes(64_000) == 32 * 2 * KV * (1024 + 512 + 4000)
    assert cost.read_bytes(100) == 32 * 2 * KV * (100 + 100 + 100 / 16)
    assert sum(line.read_bytes for line in cost.context_memory(64_000)) == cost.read_bytes(64_000)
    prefix = "model.layers.0.self_attn."
    own = {tensor.name.removeprefix(prefix): tensor.shape for tensor in mixer.tensors()}
    assert own["compress_v.position"] == (32, 128)
    assert own["compress_k.up_proj.weight"] == (256, 4096)
    assert own["compress_k.down_proj.weight"] == (128, 256)
    assert own["gate_proj.weight"] == (96, 4096)


def test_their_weights_are_not_quantised() -> None:
    with pytest.raises(ConfigurationError, match=r"model.layers.0.self_attn.q_proj.weight is of a layer whose queries"):
        shared_inputs(read("tandem_moba").layers[0])


SPARSE = MINIMAX_M3[0].config["text_config"]["sparse_attention_config"]


@pytest.mark.parametrize(
    ("model_type", "changes", "told"),
    [
        ("tandem_moba", {"moba_chunk_size": 0}, "moba_chunk_size must be an integer in [1, "),
        ("tandem_moba", {"moba_topk": "all"}, "moba_topk must be an integer in [1, "),
        ("tandem_nsa", {"nsa_compress_length": 20}, "nsa_compress_length must be a multiple of nsa_compress_stride=16"),
        ("tandem_nsa", {"nsa_compress_stride": 3, "nsa_compress_length": 6}, "must be a divisor of head_dim=128"),
        ("tandem_nsa", {"nsa_block_size": 40}, "nsa_block_size must be a multiple of nsa_compress_stride=16"),
        ("tandem_nsa", {"nsa_num_blocks": 2}, "at least the 1 first and 2 last that are always chosen, found 2"),
        ("minimax_m3", {"rotary_dim": 128}, "rotary_dim=128 is not served; supported: 64"),
        (
            "minimax_m3",
            {"index_n_heads": 4, "num_key_value_heads": 8},
            "is not served; supported: num_key_value_heads=8",
        ),
        ("minimax_m3", {"swiglu_beta": 0.5}, "swiglu_beta=0.5 is not served"),
        ("minimax_m3", {"moe_layer_freq": [1] * 59}, "moe_layer_freq must be a list of num_hidden_layers=60 entries"),
        ("minimax_m3", {"sparse_attention_config": {**SPARSE, "sparse_init_block": 1}}, "sparse_init_block=1 is not"),
        ("minimax_m3", {"sparse_attention_config": {**SPARSE, "sparse_attention_freq": [1]}}, "a list of num_hidden_l"),
        ("minimax_m3", {"sparse_attention_config": {**SPARSE, "sparse_new": 1}}, "sparse_new=1: unknown here"),
        (
            "minimax_m3",
            {"sparse_attention_config": {**SPARSE, "sparse_disable_index_value": [0] * 60}},
            "is not served; supported: 1 in every layer that chooses",
        ),
        ("minimax_m3", {"sparse_attention_config": {**SPARSE, "sparse_index_dim": 100}}, "a multiple of 8 up to 1024"),
        (
            "minimax_m3",
            {"sparse_attention_config": {**SPARSE, "sparse_local_block": 17}},
            "at most index_topk_blocks=16",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(model_type: str, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(CheckpointError) as error:
        read(model_type, **changes)
    assert told in str(error.value)
