"""Mamba-2, Nemotron-H, Falcon-H1 and Jamba: which layers a configuration becomes, and what is refused by name."""

import re
from typing import Any

import pytest

from tandem.architecture.cost import ModelCost
from tandem.architecture.feed_forward import GatedSpec, MixtureOfExpertsSpec, SquaredReluSpec
from tandem.architecture.fields import Fields
from tandem.architecture.mixers import AttentionSpec
from tandem.architecture.model import ModelSpec
from tandem.architecture.recurrent_mixers import LinearRecurrenceSpec, SelectiveScanSpec
from tandem.architecture.registry import find_family
from tandem.architecture.state import KVSpec, RecurrentSpec
from tandem.core.errors import CheckpointError

MAMBA2: dict[str, Any] = {"model_type": "mamba2", "hidden_size": 64, "num_heads": 8, "head_dim": 16, "n_groups": 2}
NEMOTRON: dict[str, Any] = {
    "model_type": "nemotron_h",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "head_dim": 16,
    "num_key_value_heads": 2,
    "mamba_num_heads": 8,
    "n_groups": 2,
}
FALCON: dict[str, Any] = {
    "model_type": "falcon_h1",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "mamba_d_ssm": 64,
    "mamba_n_heads": 4,
}

JAMBA: dict[str, Any] = {
    "model_type": "jamba",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attn_layer_period": 4,
    "attn_layer_offset": 2,
}
GELU = {"hidden_act": "gelu_pytorch_tanh"}


def read(config: dict[str, Any]) -> ModelSpec:
    fields = Fields(config, "config.json")
    return find_family(fields).read_model(fields)


def kinds(model: ModelSpec) -> list[tuple[bool, type]]:
    """Of each layer whether it attends, and its block."""
    return [(isinstance(layer.mixer, AttentionSpec), type(layer.feed_forward)) for layer in model.layers]


def test_a_block_is_taken_together_with_the_mixer_before_it() -> None:
    model = read(NEMOTRON | {"hybrid_override_pattern": "MEM*-M"})
    none = type(None)
    assert kinds(model) == [(False, MixtureOfExpertsSpec), (False, none), (True, SquaredReluSpec), (False, none)]
    names = [layer.before_mixer.name for layer in model.layers if layer.before_mixer is not None]
    assert names == [f"model.layers.{index}.norm" for index in (0, 2, 3, 5)]
    listed = ["mamba", "moe", "mamba", "attention", "mlp", "mamba"]
    assert read(NEMOTRON | {"layers_block_type": listed}) == model


def test_a_model_of_recurrences_keeps_nothing_a_token() -> None:
    model = read(MAMBA2 | {"num_hidden_layers": 3})
    assert [layer.feed_forward for layer in model.layers] == [None] * 3
    assert [state.bytes_per_token for state in model.kv_specs] == [0] * 3
    assert model.num_prompt_layers == 3


def test_layers_of_jamba_attend_and_have_experts_where_their_periods_say() -> None:
    model = read(JAMBA)
    assert [index for index, (attends, _) in enumerate(kinds(model)) if attends] == [2, 6]
    assert [index for index, (_, block) in enumerate(kinds(model)) if block is MixtureOfExpertsSpec] == [1, 3, 5, 7]
    dense = read(JAMBA | {"num_experts": 1, "expert_layer_period": 1, "expert_layer_offset": 0})
    assert {block for _, block in kinds(dense)} == {GatedSpec}
    scan = model.layers[0].mixer
    assert isinstance(scan, SelectiveScanSpec)
    assert (scan.conv.channels, scan.state_dim, scan.steps.inputs) == (128, 16, 4)


def test_mixers_side_by_side_keep_a_state_each() -> None:
    model = read(FALCON)
    kinds = [[type(mixer) for mixer in layer.mixers] for layer in model.layers]
    assert kinds == [[LinearRecurrenceSpec, AttentionSpec]] * 2
    assert [type(state) for state in model.kv_specs] == [RecurrentSpec, KVSpec] * 2
    assert (model.states_of_layer, model.wanted_states) == (((0, 1), (2, 3)), (2, 3))


def test_context_memory_has_a_line_for_each_state_of_a_layer() -> None:
    cost = ModelCost("tiny", read(FALCON))
    recurrent, attended = cost.context_memory(1000)
    assert (recurrent.num_layers, attended.num_layers) == (2, 2)
    assert recurrent.state.startswith("recurrent 4 x 16 x 256 float32")
    assert recurrent.held_bytes == cost.kv_bytes_per_request == 2 * (4 * 16 * 256 * 4 + 3 * (64 + 2 * 256) * 2)
    assert attended.held_bytes == 1000 * cost.kv_bytes_per_token == 1000 * 2 * 2 * 2 * 16 * 2
    assert recurrent.read_bytes + attended.read_bytes == cost.read_bytes(1000)


def test_multipliers_that_differ_make_maps_of_their_own() -> None:
    (first, *_) = read(FALCON).mixers
    scaled, attention, *_ = read(
        FALCON
        | {"ssm_in_multiplier": 2.0, "ssm_multipliers": [1.0, 3.0, 4.0, 5.0, 6.0], "ssm_out_multiplier": 7.0}
        | {"attention_in_multiplier": 3.0, "key_multiplier": 0.5, "attention_out_multiplier": 0.25}
    ).mixers
    assert isinstance(first, LinearRecurrenceSpec)
    assert isinstance(scaled, LinearRecurrenceSpec)
    assert isinstance(attention, AttentionSpec)
    assert [linear.scale for linear in (*first.qkv, first.gate, first.a, first.out)] == [1.0] * 4
    assert [linear.scale for linear in (*scaled.qkv, scaled.gate, scaled.a, scaled.out)] == [6, 8, 10, 2, 12, 7]
    assert (attention.scale, attention.o.scale) == (16**-0.5 * 9 * 0.5, 0.75)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (JAMBA | {"attn_layer_offset": 4}, "attn_layer_offset must be an integer in [0, 3], found 4"),
        (JAMBA | {"expert_layer_period": 0}, "expert_layer_period must be an integer in [1, "),
        (JAMBA | {"num_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok must be at most num_experts=4"),
        (JAMBA | {"mamba_inner_layernorms": False}, "mamba_inner_layernorms=false is not served; supported: true"),
        (JAMBA | {"mamba_dt_rank": 0}, "mamba_dt_rank must be an integer in [1, "),
        (JAMBA | GELU, 'hidden_act="gelu_pytorch_tanh" is not served'),
        (FALCON | GELU, 'hidden_act="gelu_pytorch_tanh" is not served; supported: silu'),
        ({"model_type": "granitemoehybrid", **GELU}, 'hidden_act="gelu_pytorch_tanh" is not served; supported: silu'),
        ({"model_type": "lfm2", **GELU}, 'hidden_act="gelu_pytorch_tanh" is not served; supported: silu'),
        ({"model_type": "lfm2_moe", **GELU}, 'hidden_act="gelu_pytorch_tanh" is not served; supported: silu'),
        (FALCON | {"mamba_n_heads": 3}, "mamba_n_heads must be heads of mamba_d_head elements that make 64 together"),
        (
            FALCON | {"ssm_multipliers": [1.0, 2.0]},
            "ssm_multipliers must be a list of 5 numbers above 0, found [1.0, 2",
        ),
        (FALCON | {"mlp_multipliers": [1.0, 0.0]}, "mlp_multipliers must be a list of 2 numbers above 0"),
        (FALCON | {"time_step_limit": [0.1, 1.0]}, "time_step_limit=[0.1, 1.0] is not served"),
        (FALCON | {"layer_types": ["hybrid", "attention"]}, "supported: hybrid in each layer"),
        (FALCON | {"projectors_bias": True}, "projectors_bias=true is not served; supported: the value of mamba_proj"),
        (
            FALCON | {"attention_bias": True, "attention_in_multiplier": 2.0},
            "attention_in_multiplier=2.0 is not served; supported: 1.0 beside biases",
        ),
        (
            FALCON | {"mamba_proj_bias": True, "projectors_bias": True, "ssm_in_multiplier": 2.0},
            "ssm_in_multiplier=2.0 is not served; supported: 1.0 beside biases",
        ),
        (NEMOTRON | {"hybrid_override_pattern": "ME-*"}, "layers in which each mlp or moe follows one that mixes"),
        (NEMOTRON | {"hybrid_override_pattern": "-M*-"}, "layers in which each mlp or moe follows one that mixes"),
        (NEMOTRON | {"hybrid_override_pattern": "MX"}, 'hybrid_override_pattern="MX" is not served; supported: lin'),
        (NEMOTRON | {"num_hidden_layers": 5}, "num_hidden_layers must be 4, as many as layer_types has, found 5"),
        (NEMOTRON | {"moe_latent_size": 0}, "moe_latent_size must be an integer in [1, 1048576], found 0"),
        (NEMOTRON | {"mlp_hidden_act": "silu"}, 'mlp_hidden_act="silu" is not served; supported: relu2'),
        (NEMOTRON | {"mamba_hidden_act": "gelu"}, 'mamba_hidden_act="gelu" is not served; supported: silu'),
        (NEMOTRON | {"n_shared_experts": 2}, "n_shared_experts=2 is not served; supported: 1"),
        (NEMOTRON | {"n_groups": 3}, "n_groups must be a divisor of mamba_num_heads=8"),
        (NEMOTRON | {"sliding_window": 64}, "sliding_window=64 is not served"),
        (NEMOTRON | {"time_step_limit": [0.0, 1.0]}, "time_step_limit=[0.0, 1.0] is not served"),
        (NEMOTRON | {"mamba_dt_limit": [0.0, 1.0]}, "mamba_dt_limit=[0.0, 1.0] is not served"),
        (NEMOTRON | {"n_groups": 2, "mamba_n_groups": 4}, "mamba_n_groups must be n_groups, which the file also has"),
        (NEMOTRON | {"norm_topk_prob": None}, "norm_topk_prob must be true or false, found null"),
        (MAMBA2 | {"hidden_act": "gelu"}, 'hidden_act="gelu" is not served; supported: silu'),
        (MAMBA2 | {"num_heads": 4}, "num_heads must be heads of head_dim=16 that make expand * hidden_size"),
        (MAMBA2 | {"time_step_limit": [0.1, 1.0]}, "time_step_limit=[0.1, 1.0] is not served"),
    ],
)
def test_what_would_change_the_results_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(message)):
        read(config)
