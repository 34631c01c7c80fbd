"""Latent attention in configurations: what is read, what is refused, and what it costs."""

import math
from typing import Any

import pytest

from tandem.architecture.cost import ModelCost
from tandem.architecture.feed_forward import MixtureOfExpertsSpec
from tandem.architecture.fields import Fields
from tandem.architecture.mixers import LatentAttentionSpec
from tandem.architecture.model import ModelSpec
from tandem.architecture.registry import find_family
from tandem.architecture.state import LatentSpec
from tandem.core.errors import CheckpointError
from tests.unit.architecture.published.deepseek import LATENT

BY_NAME = {checkpoint.name.split("/")[1]: checkpoint.config for checkpoint in LATENT}


def read(name: str, **changes: Any) -> ModelSpec:
    fields = Fields({**BY_NAME[name], **changes}, "config.json")
    return find_family(fields).read_model(fields)


def mixer_of(model: ModelSpec) -> LatentAttentionSpec:
    mixer = model.layers[-1].mixer
    assert isinstance(mixer, LatentAttentionSpec)
    return mixer


def test_deepseek_v3_keeps_576_numbers_a_token_in_every_layer() -> None:
    model = read("DeepSeek-V3")
    bfloat16 = {layer.mixer.state("bfloat16") for layer in model.layers}
    assert bfloat16 == {LatentSpec(512, 64, "bfloat16")}
    assert [str(state) for state in bfloat16] == ["latent 512 + rotated key 64 bfloat16"]
    mixer = mixer_of(model)
    assert (mixer.num_heads, mixer.plain_dim, mixer.rotary_dim, mixer.value_dim) == (128, 128, 64, 128)
    assert mixer.is_interleaved
    assert mixer.kv_norm.eps == 1e-6


def test_yarn_multiplies_scores_by_the_square_of_its_second_factor() -> None:
    mixer = mixer_of(read("DeepSeek-V3"))
    assert mixer.rope is not None
    assert mixer.rope.attention_factor == 1.0  # mscale and mscale_all_dim are equal
    assert mixer.scale == pytest.approx(192**-0.5 * 1.8738, rel=1e-4)
    one = read("DeepSeek-V3", rope_scaling=BY_NAME["DeepSeek-V3"]["rope_scaling"] | {"mscale": 0.5})
    rope = mixer_of(one).rope
    assert rope is not None
    assert rope.attention_factor == pytest.approx((0.05 * math.log(40) + 1) / (0.1 * math.log(40) + 1))
    assert mixer_of(read("DeepSeek-V3", rope_scaling=None)).scale == 192**-0.5


def test_queries_without_a_latent() -> None:
    lite, large = (mixer_of(read(name)) for name in ("DeepSeek-V2-Lite", "DeepSeek-V2"))
    assert (lite.q_a, lite.q_norm, lite.q.name) == (None, None, "model.layers.26.self_attn.q_proj")
    assert large.q_a is not None
    assert large.q.inputs == large.q_a.outputs == 1536


def test_biases_are_of_the_outer_maps_alone() -> None:
    mixer = mixer_of(read("DeepSeek-V3", attention_bias=True))
    assert mixer.q_a is not None
    assert [linear.bias for linear in (mixer.q_a, mixer.q, mixer.kv_a, mixer.kv_b, mixer.o)] == [
        *(True, False, True, False, True)
    ]


def test_groups_count_by_their_best_expert_or_by_two() -> None:
    found = []
    for name in ("DeepSeek-V2-Lite", "DeepSeek-V2", "DeepSeek-V3", "Mistral-Small-4-119B-2603"):
        block = read(name).layers[-1].feed_forward
        assert isinstance(block, MixtureOfExpertsSpec)
        router = block.router
        found.append((router.num_groups, router.top_groups, router.best_of_group, router.renormalise))
    assert found == [(1, 1, 1, False), (8, 3, 1, False), (8, 4, 2, True), (1, 1, 2, True)]


def test_queries_of_mistral_4_grow_with_their_position() -> None:
    mixer = mixer_of(read("Mistral-Small-4-119B-2603"))
    assert mixer.query_scaling is not None
    assert (mixer.query_scaling.beta, mixer.query_scaling.original_length) == (0.1, 8192)
    assert mixer.rope is not None
    assert (mixer.rope.rotary_dim, mixer.rank) == (64, 256)


def test_a_million_tokens_take_an_eighth_of_what_keys_and_values_would() -> None:
    """Of 16 heads of 128 each for keys and values, 4,096 numbers a layer, it keeps 576."""
    cost = ModelCost("lite", read("DeepSeek-V2-Lite"))
    assert cost.kv_bytes_per_token == 27 * 576 * 2
    assert cost.kv_bytes(1_000_000) == cost.read_bytes(1_000_000) == 27 * 576 * 2 * 1_000_000
    pairs = 16 * 2 * (576 + 512)
    assert cost.step_attention_flops(1000) == 27 * pairs * 1000
    assert cost.attention_flops(1000) == 27 * pairs * 500_000


@pytest.mark.parametrize(
    ("name", "changes", "told"),
    [
        ("DeepSeek-V3", {"kv_lora_rank": 0}, "kv_lora_rank must be an integer in"),
        ("DeepSeek-V3", {"qk_rope_head_dim": 63}, "qk_rope_head_dim must be even"),
        ("DeepSeek-V3", {"qk_nope_head_dim": "128"}, "qk_nope_head_dim must be an integer"),
        ("DeepSeek-V3", {"num_key_value_heads": 8}, "num_key_value_heads must be num_attention_heads=128"),
        ("DeepSeek-V3", {"qk_head_dim": 128}, "qk_head_dim=128 is not served"),
        ("DeepSeek-V3", {"scoring_func": "softmax"}, "scoring_func="),
        ("DeepSeek-V3", {"topk_method": "greedy"}, "topk_method="),
        ("DeepSeek-V3", {"moe_layer_freq": 2}, "moe_layer_freq=2 is not served"),
        ("DeepSeek-V3", {"n_group": 256}, "n_group must be 1, or a divisor of the 256 experts"),
        ("DeepSeek-V3", {"topk_group": 9}, "topk_group must be an integer in"),
        ("DeepSeek-V3", {"model_type": "deepseek_v9"}, "model_type"),
        ("DeepSeek-V2", {"norm_topk_prob": True}, "norm_topk_prob=true is not served"),
        ("DeepSeek-V2", {"scoring_func": "sigmoid"}, "scoring_func="),
        ("DeepSeek-V2", {"topk_method": "noaux_tc"}, "topk_method="),
        ("GLM-4.7-Flash", {"first_k_dense_replace": 3}, "first_k_dense_replace=3 is not served"),
        ("GLM-4.7-Flash", {"mlp_layer_types": ["dense"]}, "mlp_layer_types must be a list of num_hidden_layers=47"),
        ("GLM-4.7-Flash", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not served"),
        ("Mistral-Small-4-119B-2603", {"rope_parameters": None}, "rope_parameters must be an object"),
        ("Mistral-Small-4-119B-2603", {"qk_nope_head_dim": 128}, "partial_rotary_factor"),
    ],
)
def test_bad_values_are_refused_by_name(name: str, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(CheckpointError) as error:
        read(name, **changes)
    assert told in str(error.value)
