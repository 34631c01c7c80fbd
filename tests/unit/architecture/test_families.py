"""Specs of each family's configuration, on values copied from published models of that family."""

from typing import Any

import pytest

from tandem.architecture.fields import Fields
from tandem.architecture.mixers import QueryScaling
from tandem.architecture.model import ModelSpec
from tandem.architecture.registry import find_family, supported_architectures
from tandem.architecture.rope import LinearScaling, ProportionalScaling, RopeSpec
from tandem.core.errors import CheckpointError, UnsupportedCheckpointError
from tests.helpers.specs import attention_of
from tests.unit.architecture.published import CHECKPOINTS

_PUBLISHED = {checkpoint.name: dict(checkpoint.config) for checkpoint in CHECKPOINTS}
LLAMA_3_2_1B = _PUBLISHED["meta-llama/Llama-3.2-1B-Instruct"]
QWEN_2_5_05B = _PUBLISHED["Qwen/Qwen2.5-0.5B-Instruct"]
QWEN3_06B: dict[str, Any] = QWEN_2_5_05B | {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_size": 1024,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "rope_scaling": None,
    "sliding_window": None,
}
GEMMA3_1B = _PUBLISHED["google/gemma-3-1b-it"]
GEMMA3_4B: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "initializer_range": 0.02,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152},
}
MISTRAL_7B: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}


def read(values: dict[str, Any]) -> ModelSpec:
    fields = Fields(values, "config.json")
    return find_family(fields).read_model(fields)


def windows(model: ModelSpec) -> list[int | None]:
    return [mixer.window for mixer in attention_of(model)]


def test_llama() -> None:
    model = read(LLAMA_3_2_1B)
    mixer = attention_of(model)[0]
    assert (model.num_layers, mixer.num_heads, mixer.num_kv_heads, mixer.head_dim) == (16, 32, 8, 64)
    assert mixer.scale == 0.125
    assert model.tie_word_embeddings
    assert not any(linear.bias for linear in (mixer.q, mixer.k, mixer.v, mixer.o) if linear is not None)
    assert mixer.q_norm is None
    assert model.eos_token_ids == (128001, 128008, 128009)
    assert mixer.rope is not None
    assert mixer.rope.rotary_dim == 64


def test_qwen2_has_biases_on_the_inputs_of_attention_only() -> None:
    model = read(QWEN_2_5_05B)
    mixer = attention_of(model)[0]
    biases = [linear.bias for linear in (mixer.q, mixer.k, mixer.v, mixer.o) if linear is not None]
    assert biases == [True, True, True, False]
    assert mixer.head_dim == 64
    assert set(windows(model)) == {None}


def test_qwen2_windows_start_at_max_window_layers() -> None:
    model = read(QWEN_2_5_05B | {"use_sliding_window": True, "sliding_window": 100})
    assert windows(model) == [None] * 21 + [100] * 3


def test_qwen3() -> None:
    model = read(QWEN3_06B)
    mixer = attention_of(model)[0]
    assert mixer.q_norm is not None
    assert mixer.q_norm.size == mixer.head_dim == 128
    assert not mixer.q.bias
    assert model.hidden_size == 1024


def test_gemma3() -> None:
    model = read(GEMMA3_1B)
    layer, last = model.layers[0], model.layers[5]
    assert windows(model) == ([512] * 5 + [None]) * 4 + [512, 512]
    assert attention_of(model)[0].scale == 1 / 16
    assert model.embedding_scale == pytest.approx(1152**0.5)
    assert model.final_norm.unit_offset
    assert layer.after_mixer is not None
    assert layer.after_feed_forward is not None
    assert model.tie_word_embeddings
    assert layer.mixer.rope is not None
    assert last.mixer.rope is not None
    assert (layer.mixer.rope.theta, last.mixer.rope.theta) == (10000, 1000000)


def test_gemma3_multimodal_fills_absent_keys_and_scales_global_layers_only() -> None:
    model = read(GEMMA3_4B)
    local, last = attention_of(model)[0], attention_of(model)[5]
    assert (local.num_heads, local.num_kv_heads, local.head_dim, model.vocab_size) == (8, 4, 256, 262208)
    assert last.rope is not None
    assert last.rope.scaling == LinearScaling(8.0)
    assert local.rope is not None
    assert local.rope.scaling != last.rope.scaling
    assert model.eos_token_ids == (1, 106)


GEMMA4_SHARED: dict[str, Any] = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "attention_k_eq_v": True,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_global_key_value_heads": 2,
    "num_hidden_layers": 7,
    "num_kv_shared_layers": 3,
    "layer_types": [*["sliding_attention"] * 2, "full_attention", "sliding_attention"] + ["sliding_attention"] * 3,
    "use_double_wide_mlp": True,
    "intermediate_size": 96,
}


def test_gemma4_layers_read_the_state_of_the_last_of_their_kind() -> None:
    """The last layer is global though the file says otherwise, as in transformers."""
    model = read(GEMMA4_SHARED)
    assert windows(model) == [512, 512, None, 512, 512, 512, None]
    assert [layer.mixer.reads_state_of for layer in model.layers] == [None] * 4 + [3, 3, 2]
    assert model.states_of_layer == ((0,), (1,), (2,), (3,), (3,), (3,), (2,))
    assert (model.num_prompt_layers, len(model.kv_specs), model.wanted_states) == (4, 4, (2, 3))
    local, last = attention_of(model)[3], attention_of(model)[6]
    assert (local.num_kv_heads, local.head_dim, last.num_kv_heads, last.head_dim) == (4, 256, 2, 512)
    assert (local.scale, last.scale) == (1.0, 1.0)
    assert [mixer.k is None for mixer in (local, last)] == [False, True]
    assert [mixer.v is None for mixer in attention_of(model)] == [False, False, True, False, True, True, True]
    widths = [tensor.shape[0] for tensor in model.tensors() if tensor.name.endswith("mlp.gate_proj.weight")]
    assert widths == [96] * 4 + [192] * 3
    assert model.embedding_scale == 8.0


def test_gemma4_rotates_a_quarter_of_the_pairs_of_global_heads() -> None:
    local, last = (read(GEMMA4_SHARED).layers[index].mixer.rope for index in (0, 2))
    assert local == RopeSpec(256, 10_000.0)
    assert last == RopeSpec(512, 1_000_000.0, ProportionalScaling(share=0.25, factor=1.0))


def test_gemma4_per_layer_embeddings_share_a_table() -> None:
    model = read(GEMMA4_SHARED)
    tensors = {tensor.name: tensor for tensor in model.tensors()}
    assert len(tensors) == len(list(model.tensors()))
    assert tensors["model.embed_tokens_per_layer.weight"].shape == (262_144, 7 * 256)
    sources = [tensor.source for tensor in tensors.values() if "per_layer_model_projection" in tensor.name]
    assert [source.start for source in sources if source is not None] == [256 * index for index in range(7)]
    assert read(GEMMA4_SHARED | {"hidden_size_per_layer_input": 0}).layers[0].per_layer_embedding is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default", "partial_rotary_factor": 0.25}}}, "sliding"),
        ({"layer_types": ["chunked_attention"] * 7}, "layer_types.*full_attention"),
    ],
)
def test_gemma4_with_other_maths_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(GEMMA4_SHARED | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_kv_shared_layers": 7},
        {"num_kv_shared_layers": 5},
        {"sliding_window": None},
        {"num_global_key_value_heads": 3},
        {"global_head_dim": 511},
        {"per_layer_config": {"2": {"head_dim": 33}}},
        {"num_kv_shared_layers": 3, "per_layer_config": {"2": {"head_dim": 64}}},
        {"per_layer_config": {"2": {"window": 5}}},
        {"vocab_size_per_layer_input": 1000},
        {"enable_moe_block": True},
        {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 5, "moe_intermediate_size": 8},
    ],
)
def test_gemma4_with_contradictions_is_refused(changes: dict[str, Any]) -> None:
    """By the first key, or a part of its value, or a size that is not there."""
    names = "|".join([*changes, "head_dim", "window", "num_experts", "top_k_experts"])
    with pytest.raises(CheckpointError, match=names):
        read(GEMMA4_SHARED | changes)


@pytest.mark.parametrize(("value", "window"), [(4096, 4096), (None, None)])
def test_mistral_window(value: int | None, window: int | None) -> None:
    assert set(windows(read(MISTRAL_7B | {"sliding_window": value}))) == {window}


def test_mistral_without_the_key_has_the_default_window() -> None:
    values = {key: value for key, value in MISTRAL_7B.items() if key != "sliding_window"}
    assert attention_of(read(values))[0].window == 4096


@pytest.mark.parametrize(("kind", "window"), [("sliding_attention", 4096), ("full_attention", None)])
def test_mistral_with_kinds_of_layers_has_the_window_in_sliding_ones(kind: str, window: int | None) -> None:
    """With `full_attention` throughout, the list was reported as without effect and every layer had the window."""
    values = MISTRAL_7B | {"sliding_window": 4096, "layer_types": ["full_attention", *[kind] * 31]}
    assert windows(read(values)) == [None, *[window] * 31]


@pytest.mark.parametrize("window", [{"sliding_window": 4096}, {}])
def test_mistral_inside_a_multimodal_model_has_one_window(window: dict[str, Any]) -> None:
    """`transformers` reads no `layer_types` there, so that the list contradicts what it computes."""
    text = {key: value for key, value in MISTRAL_7B.items() if key not in ("architectures", "sliding_window")}
    values: dict[str, Any] = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "text_config": {**text, **window},
    }
    assert {*windows(read(values))} == {4096}
    values["text_config"]["layer_types"] = ["full_attention"] * 32
    with pytest.raises(UnsupportedCheckpointError, match="layer_types="):
        read(values)


def _ministral3(**keys: Any) -> dict[str, Any]:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "llama_4_scaling_beta": 0.1}
    return {**MISTRAL_7B, "architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3"} | {
        "rope_parameters": rope,
        **keys,
    }


def test_ministral3_without_a_theta_in_its_rope_has_that_of_the_top() -> None:
    """It had 10 000 whatever `rope_theta` said."""
    rope = read(_ministral3(rope_theta=1e6)).layers[0].mixer.rope
    assert rope is not None
    assert rope.theta == 1e6


def test_queries_of_ministral3_grow_from_the_original_length_at_the_top_on() -> None:
    """It was read for the angles alone, and queries grew from the length inside `rope_parameters` on."""
    mixer = attention_of(read(_ministral3(original_max_position_embeddings=32)))[0]
    assert mixer.query_scaling == QueryScaling(0.1, 32)
    assert attention_of(read(_ministral3()))[0].query_scaling == QueryScaling(0.1, 64)


def test_ministral3_with_rope_scaling_is_refused() -> None:
    """`rope_scaling` would win over `rope_parameters` in transformers; it was reported and ignored."""
    with pytest.raises(UnsupportedCheckpointError, match="rope_scaling="):
        read(_ministral3(rope_scaling={"rope_type": "linear", "factor": 2.0}))


def test_model_type_is_enough() -> None:
    values = {key: value for key, value in MISTRAL_7B.items() if key != "architectures"}
    assert read(values).family == "mistral"


def test_every_architecture_has_a_family() -> None:
    for name in supported_architectures():
        assert find_family(Fields({"architectures": [name]}, "config.json")).read_model is not None
