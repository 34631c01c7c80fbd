"""Rotary parameters by value, where a formula could be wrong without a short prompt noticing."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tandem.architecture.families import phi3
from tandem.architecture.families.llama import FAMILY
from tandem.architecture.fields import Fields
from tandem.architecture.model import ModelSpec, choose_rope_factors
from tandem.architecture.registry import find_family
from tandem.architecture.rope import ProportionalScaling, RopeSpec
from tandem.core.errors import CorruptCheckpointError, UnsupportedCheckpointError
from tandem.models.layers.rotary import build_rotary_tables, inverse_frequencies
from tests.unit.architecture.published.longrope import PHI_4_MINI

SIZES: dict[str, Any] = {
    "vocab_size": 8,
    "hidden_size": 256,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 131072,
}
PARAMETERS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 3.0, "rope_theta": 10000.0},
    "llama 3.1": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "qwen yarn": {
        "rope_type": "yarn",
        "rope_theta": 1000000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
    },
    "yarn without an original length": {"rope_type": "yarn", "rope_theta": 10000, "factor": 4.0},
    "proportional": {"rope_type": "proportional", "factor": 2.0, "rope_theta": 1000000.0},
    "yarn with a factor of attention": {"rope_type": "yarn", "factor": 4, "attention_factor": 0.5, "rope_theta": 1e4},
}


def read(parameters: dict[str, Any], **others: Any) -> ModelSpec:
    return FAMILY.read_model(Fields(SIZES | {"rope_parameters": parameters} | others, "config.json"))


def read_model(values: dict[str, Any]) -> ModelSpec:
    fields = Fields(values, "config.json")
    return find_family(fields).read_model(fields)


@pytest.mark.parametrize("name", PARAMETERS)
def test_frequencies_equal_transformers_bit_for_bit(name: str) -> None:
    parameters = PARAMETERS[name]
    config = transformers.LlamaConfig(**SIZES, rope_parameters=dict(parameters))
    expected, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config)
    rope = read(parameters).layers[0].mixer.rope
    assert rope is not None
    assert torch.equal(inverse_frequencies(rope), expected)
    assert rope.attention_factor == factor


def test_frequencies_of_a_share_of_the_pairs_equal_transformers_bit_for_bit() -> None:
    """A quarter of the pairs of a head of 512, as in Gemma 4's global layers."""
    config = transformers.Gemma4TextConfig(num_hidden_layers=6)
    expected, factor = ROPE_INIT_FUNCTIONS["proportional"](config, layer_type="full_attention")
    rope = RopeSpec(rotary_dim=512, theta=1e6, scaling=ProportionalScaling(share=0.25, factor=1.0))
    assert torch.equal(inverse_frequencies(rope), expected)
    assert (factor, int(expected.count_nonzero())) == (1.0, 64)


def test_original_length_at_the_top_wins() -> None:
    parameters = PARAMETERS["qwen yarn"]
    outer = read(parameters, original_max_position_embeddings=4096).layers[0].mixer.rope
    assert outer == read(parameters | {"original_max_position_embeddings": 4096}).layers[0].mixer.rope
    assert outer != read(parameters).layers[0].mixer.rope


@pytest.mark.parametrize(
    ("name", "outer", "longest"),
    [
        ("qwen yarn", {"max_position_embeddings": 40960}, 131072),
        ("qwen yarn", {"max_position_embeddings": 40960, "original_max_position_embeddings": 16384}, 65536),
        ("qwen yarn", {"max_position_embeddings": 163840}, 163840),
        ("linear", {"max_position_embeddings": 4096, "original_max_position_embeddings": 4096}, 12288),
        ("linear", {"max_position_embeddings": 12288}, 12288),
        ("yarn without an original length", {"max_position_embeddings": 4096}, 4096),
        ("llama 3.1", {"max_position_embeddings": 16384}, 16384),
    ],
)
def test_a_stretched_embedding_allows_more_positions_than_are_usual(
    name: str, outer: dict[str, int], longest: int
) -> None:
    config = read(PARAMETERS[name], **outer)
    assert (config.max_position_embeddings, config.longest_length) == (outer["max_position_embeddings"], longest)


def test_other_types_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedCheckpointError, match=r"dynamic.*default, linear, llama3, longrope, proportional"):
        read({"rope_type": "dynamic", "factor": 2.0})


@pytest.mark.parametrize(
    ("length", "is_long"), [(2, False), (4096, False), (4097, True), (None, True)], ids=lambda value: str(value)
)
@pytest.mark.parametrize("options", [{}, {"factor": 4}, {"attention_factor": 0.7}], ids=str)
def test_longrope_of_a_length_equals_transformers_bit_for_bit(
    length: int | None, is_long: bool, options: dict[str, Any]
) -> None:
    parameters = {"rope_type": "longrope", "rope_theta": 1e4, **PHI_4_MINI, **options}
    sizes = SIZES | {"partial_rotary_factor": 0.75, "original_max_position_embeddings": 4096}
    config = transformers.Phi3Config(**sizes, pad_token_id=0, rope_parameters=dict(parameters))
    expected, factor = ROPE_INIT_FUNCTIONS["longrope"](config, seq_len=4097 if is_long else None)
    model = phi3.FAMILY.read_model(Fields(sizes | {"rope_parameters": parameters}, "config.json"))
    rope = choose_rope_factors(model, length).layers[0].mixer.rope
    assert rope is not None
    assert torch.equal(inverse_frequencies(rope), expected)
    assert rope.attention_factor == factor


def test_longrope_of_phi_3_with_the_original_length_inside_alone_is_refused() -> None:
    """Transformers reads it outside of the rope's parameters, and has 4,096 if it is not there."""
    rope = {"rope_type": "longrope", **PHI_4_MINI}
    sizes = SIZES | {"partial_rotary_factor": 0.75}

    def read_phi3(inside: int, **outside: int) -> ModelSpec:
        parameters = rope | {"original_max_position_embeddings": inside}
        return phi3.FAMILY.read_model(Fields(sizes | {"rope_parameters": parameters} | outside, "config.json"))

    assert read_phi3(4096) == read_phi3(8192, original_max_position_embeddings=4096)
    with pytest.raises(UnsupportedCheckpointError, match=r"original_max_position_embeddings=8192 is not served.*4096"):
        read_phi3(8192)


@pytest.mark.parametrize("config_class", [transformers.Olmo3Config, transformers.Gemma3TextConfig])
def test_an_embedding_of_some_layers_equals_transformers(config_class: type[transformers.PreTrainedConfig]) -> None:
    """An original length outside of it is not read, and `truncate` is not read at all: it was followed."""
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    others = {
        "layer_types": ["sliding_attention", "full_attention"],
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "original_max_position_embeddings": 16,
        "rope_parameters": {"full_attention": yarn, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}},
    }
    expected, factor = ROPE_INIT_FUNCTIONS["yarn"](
        config_class(**deepcopy(SIZES | others)), layer_type="full_attention"
    )
    file = SIZES | others | {"model_type": config_class.model_type}
    rope = read_model(file).layers[1].mixer.rope
    assert rope is not None
    assert torch.equal(inverse_frequencies(rope), expected)
    assert rope.attention_factor == factor
    yarn["truncate"] = False
    with pytest.raises(UnsupportedCheckpointError, match="truncate=false is not served"):
        read_model(file)


def test_attn_factor_is_refused_with_both_readings() -> None:
    """Transformers ignores it; others multiply by it, here to no factor at all."""
    parameters = PARAMETERS["qwen yarn"] | {"attn_factor": 0.8782488562869419}
    with pytest.raises(UnsupportedCheckpointError, match=r"attn_factor.*by 1\.13863.* by 1;.*attention_factor"):
        read(parameters)
    assert read(parameters | {"attn_factor": 1.0}) == read(PARAMETERS["qwen yarn"])


def test_tables_hold_scaled_cosines_of_float32_angles() -> None:
    rope = RopeSpec(rotary_dim=4, theta=16.0, attention_factor=2.0)
    tables = build_rotary_tables([rope, replace(rope)], 9, torch.device("cpu"))
    assert len(tables) == 1, "equal configurations share a table"
    table = tables[rope]
    torch.testing.assert_close(table.cos[8], 2 * torch.tensor([8.0, 2.0]).cos())
    torch.testing.assert_close(table.sin[8], 2 * torch.tensor([8.0, 2.0]).sin())
    assert table.cos.dtype == torch.float32


def test_no_embedding_has_a_table_without_columns() -> None:
    table = build_rotary_tables([None], 9, torch.device("cpu"))[None]
    assert table.cos.shape == table.sin.shape == (9, 0)


def test_parameters_without_finite_angles_are_refused_by_value() -> None:
    rope = read({"rope_type": "linear", "factor": 1e-300, "rope_theta": 1e4}).layers[0].mixer.rope
    assert rope is not None
    with pytest.raises(CorruptCheckpointError, match=r"1e-300.*not finite.*config.json"):
        inverse_frequencies(rope)
