"""Mamba-2 and Nemotron-H: which layers a configuration becomes, and what is refused by name."""

import re
from typing import Any

import pytest

from tandem.architecture.feed_forward import MixtureOfExpertsSpec, SquaredReluSpec
from tandem.architecture.fields import Fields
from tandem.architecture.mixers import AttentionSpec
from tandem.architecture.model import ModelSpec
from tandem.architecture.registry import find_family
from tandem.architecture.shards import shard_model
from tandem.core.errors import CheckpointError, ConfigurationError

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


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (NEMOTRON | {"hybrid_override_pattern": "ME-*"}, "layers in which each mlp or moe follows one that mixes"),
        (NEMOTRON | {"hybrid_override_pattern": "-M*-"}, "layers in which each mlp or moe follows one that mixes"),
        (NEMOTRON | {"hybrid_override_pattern": "MX"}, 'hybrid_override_pattern="MX" is not served; supported: lin'),
        (NEMOTRON | {"num_hidden_layers": 5}, "num_hidden_layers must be 4, as many as layer_types has, found 5"),
        (NEMOTRON | {"moe_latent_size": 32}, "moe_latent_size=32 is not served; supported: absent"),
        (NEMOTRON | {"mlp_hidden_act": "silu"}, 'mlp_hidden_act="silu" is not served; supported: relu2'),
        (NEMOTRON | {"mamba_hidden_act": "gelu"}, 'mamba_hidden_act="gelu" is not served; supported: silu'),
        (NEMOTRON | {"n_shared_experts": 2}, "n_shared_experts=2 is not served; supported: 1"),
        (NEMOTRON | {"n_groups": 3}, "n_groups must be a divisor of mamba_num_heads=8"),
        (NEMOTRON | {"sliding_window": 64}, "sliding_window=64 is not served"),
        (NEMOTRON | {"time_step_limit": [0.0, 1.0]}, "time_step_limit=[0.0, 1.0] is not served"),
        (MAMBA2 | {"hidden_act": "gelu"}, 'hidden_act="gelu" is not served; supported: silu'),
        (MAMBA2 | {"num_heads": 4}, "num_heads must be heads of head_dim=16 that make expand * hidden_size"),
        (MAMBA2 | {"time_step_limit": [0.1, 1.0]}, "time_step_limit=[0.1, 1.0] is not served"),
    ],
)
def test_what_would_change_the_results_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(message)):
        read(config)


@pytest.mark.parametrize("config", [MAMBA2, NEMOTRON])
def test_ranks_are_refused_by_name(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"layer 0 has a mixer of LinearRecurrence, whose heads are not split"):
        shard_model(read(config), 0, 2)
