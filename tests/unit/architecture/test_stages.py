"""Stages of a model: every layer once, cut where no layer reads what one before the cut has."""

from dataclasses import replace
from typing import Any

import pytest

from tandem.architecture.fields import Fields
from tandem.architecture.mixers import AttentionSpec
from tandem.architecture.model import ModelSpec
from tandem.architecture.registry import find_family
from tandem.architecture.stages import check_group, stage_bounds, stage_of, states_of_stages
from tandem.core.errors import ConfigurationError

SIZES: dict[str, Any] = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}


@pytest.fixture
def model() -> ModelSpec:
    fields = Fields(SIZES, "config.json")
    return find_family(fields).read_model(fields)


def sharing(model: ModelSpec, readers: dict[int, int]) -> ModelSpec:
    """With layers that read the state of earlier ones."""
    layers = list(model.layers)
    for reader, owner in readers.items():
        mixer = layers[reader].mixer
        assert isinstance(mixer, AttentionSpec)
        layers[reader] = replace(layers[reader], mixer=replace(mixer, k=None, v=None, reads_state_of=owner))
    return replace(model, layers=tuple(layers))


@pytest.mark.parametrize("num_stages", [2, 3, 7])
def test_stages_have_every_tensor_once(model: ModelSpec, num_stages: int) -> None:
    stages = [stage_of(model, stage, num_stages) for stage in range(num_stages)]
    assert sum((stage.layers for stage in stages), ()) == model.layers
    names = [tensor.name for stage in stages for tensor in stage.tensors()]
    assert sorted(names) == sorted(tensor.name for tensor in model.tensors())
    assert [stage.embedding for stage in stages] == [model.embedding] + [None] * (num_stages - 1)
    heads = [tensor for stage in stages for tensor in stage.weights() if tensor.name == "lm_head.weight"]
    assert heads == [stages[-1].head]
    assert [stage.head for stage in stages[:-1]] == [None] * (num_stages - 1)
    sizes = [stage.num_layers for stage in stages]
    assert max(sizes) - min(sizes) <= 1
    assert states_of_stages(model, num_stages) == tuple(sizes)
    assert [stage.wanted_states for stage in stages[:-1]] == [()] * (num_stages - 1)
    assert stages[-1].wanted_states == (sizes[-1] - 1,)


def test_a_layer_that_reads_the_state_of_another_is_in_its_stage(model: ModelSpec) -> None:
    shared = sharing(model, {4: 2, 6: 5})
    assert stage_bounds(shared, 2) == (0, 5, 7)
    (stage,) = (stage_of(shared, 0, 2),)
    assert stage.states_of_layer == ((0,), (1,), (2,), (3,), (2,))
    last = stage_of(shared, 1, 2)
    assert last.states_of_layer == ((0,), (0,))
    assert stage_bounds(shared, 4) == (0, 1, 2, 5, 7)


def test_models_that_cannot_be_cut_are_refused_with_what_can_be_had(model: ModelSpec) -> None:
    with pytest.raises(ConfigurationError, match=r"pp=8 cannot serve this qwen3 model: it has 7 layers; .* pp=1 to 7"):
        stage_bounds(model, 8)
    with pytest.raises(
        ConfigurationError, match=r"pp=2 .* layers read what earlier ones keep.*; what can be had: pp=1$"
    ):
        stage_bounds(sharing(model, {6: 0}), 2)
    with pytest.raises(ConfigurationError, match=r"tp=8 with pp=3 are 24 ranks, .* give pp=2 or less"):
        check_group(8, 3)
    with pytest.raises(ConfigurationError, match=r"tp=8 with cp=3 are 24 ranks, .* give cp=2 or less"):
        check_group(8, 1, 3)
    with pytest.raises(ConfigurationError, match=r"tp=4 with pp=2 with cp=3 are 24 ranks, .* give cp=2 or less"):
        check_group(4, 2, 3)
    check_group(8, 2)
    check_group(2, 2, 4)
