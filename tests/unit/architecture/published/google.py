"""Checkpoints of Gemma 3 and 4: text models, and text models inside multimodal ones."""

from typing import Any

from tests.unit.architecture.published.checkpoint import Checkpoint

_PATTERN = [*["sliding_attention"] * 5, "full_attention"]
_SCALED = {"factor": 8.0, "rope_type": "linear"}
_WRAPPER: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "initializer_range": 0.02,
    "mm_tokens_per_image": 256,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0",
    "vision_config": {
        "hidden_size": 1152,
        "image_size": 896,
        "intermediate_size": 4304,
        "model_type": "siglip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "patch_size": 14,
        "vision_use_head": False,
    },
}
_SHAPE_27B = {
    "model_type": "gemma3_text",
    "head_dim": 128,
    "hidden_size": 5376,
    "intermediate_size": 21504,
    "num_attention_heads": 32,
    "num_hidden_layers": 62,
    "num_key_value_heads": 16,
    "query_pre_attn_scalar": 168,
    "rope_scaling": _SCALED,
    "sliding_window": 1024,
}
_NEURON = "github.com/aws-neuron/neuronx-distributed-inference, tests"

GEMMA = (
    Checkpoint(
        name="google/gemma-2-2b-it",
        config={
            "architectures": ["Gemma2ForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "attn_logit_softcapping": 50.0,
            "bos_token_id": 2,
            "cache_implementation": "hybrid",
            "eos_token_id": [1, 107],
            "final_logit_softcapping": 30.0,
            "head_dim": 256,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": 2304,
            "initializer_range": 0.02,
            "intermediate_size": 9216,
            "max_position_embeddings": 8192,
            "model_type": "gemma2",
            "num_attention_heads": 8,
            "num_hidden_layers": 26,
            "num_key_value_heads": 4,
            "pad_token_id": 0,
            "query_pre_attn_scalar": 256,
            "rms_norm_eps": 1e-06,
            "rope_theta": 10000.0,
            "sliding_window": 4096,
            "torch_dtype": "bfloat16",
            "transformers_version": "4.42.4",
            "use_cache": True,
            "vocab_size": 256000,
        },
        source="github.com/huggingface/transformers, docs and tests of Gemma 2",
        total=2_614_341_888,
    ),
    Checkpoint(
        name="google/gemma-3-1b-it",
        config={
            "architectures": ["Gemma3ForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "attn_logit_softcapping": None,
            "bos_token_id": 2,
            "cache_implementation": "hybrid",
            "eos_token_id": [1, 106],
            "final_logit_softcapping": None,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": 1152,
            "initializer_range": 0.02,
            "intermediate_size": 6912,
            "max_position_embeddings": 32768,
            "model_type": "gemma3_text",
            "num_attention_heads": 4,
            "num_hidden_layers": 26,
            "num_key_value_heads": 1,
            "pad_token_id": 0,
            "query_pre_attn_scalar": 256,
            "rms_norm_eps": 1e-06,
            "rope_local_base_freq": 10000,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
            "torch_dtype": "bfloat16",
            "transformers_version": "4.50.0.dev0",
            "use_cache": True,
            "vocab_size": 262144,
        },
        total=999_885_952,
        kv_bytes=26_624,
        source="github.com/mlc-ai/mlc-llm, model_preset.py",
    ),
    Checkpoint(
        name="google/gemma-3-4b-it",
        config=_WRAPPER
        | {
            "text_config": {
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "model_type": "gemma3_text",
                "num_hidden_layers": 34,
                "rope_scaling": _SCALED,
                "sliding_window": 1024,
            }
        },
        total=4_300_079_472 - 419_816_304,  # NOTE: without vision tower and projector
        kv_bytes=139_264,
        source="github.com/Lightning-AI/litgpt, config.py",
        recalled=("text_config", "transformers_version", "vision_config"),
    ),
    Checkpoint(
        name="google/gemma-3-27b-it",
        config=_WRAPPER | {"text_config": _SHAPE_27B},
        total=27_432_406_640 - 423_060_336,
        kv_bytes=507_904,
        source=_NEURON,
        recalled=("num_hidden_layers",),
    ),
    Checkpoint(
        name="google/gemma-3-27b-it, saved again by transformers 4.56",
        config={key: value for key, value in _WRAPPER.items() if key != "torch_dtype"}
        | {
            "dtype": "bfloat16",
            "text_config": _SHAPE_27B
            | {
                "_sliding_window_pattern": 6,
                "attention_bias": False,
                "attention_dropout": 0.0,
                "attn_logit_softcapping": None,
                "final_logit_softcapping": None,
                "hidden_activation": "gelu_pytorch_tanh",
                "initializer_range": 0.02,
                "layer_types": [*_PATTERN * 10, "sliding_attention", "sliding_attention"],
                "max_position_embeddings": 131072,
                "rms_norm_eps": 1e-06,
                "rope_local_base_freq": 10000.0,
                "rope_theta": 1000000.0,
                "use_cache": True,
                "vocab_size": 262208,
            },
            "transformers_version": "4.56.2",
        },
        total=27_432_406_640 - 423_060_336,
        kv_bytes=507_904,
        source=_NEURON,
    ),
)

_GEMMA4_ROPES = {
    "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
    "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
}
_GEMMA4_SHAPE: dict[str, Any] = {
    "global_head_dim": 512,
    "head_dim": 256,
    "final_logit_softcapping": 30.0,
    "max_position_embeddings": 131072,
    "model_type": "gemma4_text",
    "rms_norm_eps": 1e-06,
    "rope_parameters": _GEMMA4_ROPES,
    "tie_word_embeddings": True,
    "vocab_size": 262144,
}
_GEMMA4_LARGE: dict[str, Any] = {
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": None,
    "max_position_embeddings": 262144,
    "num_kv_shared_layers": 0,
    "sliding_window": 1024,
    "use_bidirectional_attention": "vision",
    "use_double_wide_mlp": False,
}
_GEMMA4_SMALL: dict[str, Any] = {
    "attention_k_eq_v": False,
    "hidden_size_per_layer_input": 256,
    "num_attention_heads": 8,
    "sliding_window": 512,
    "vocab_size_per_layer_input": 262144,
}
_GEMMA4_26B: dict[str, Any] = {
    "enable_moe_block": True,
    "hidden_size": 2816,
    "intermediate_size": 2112,
    "layer_types": _PATTERN * 5,
    "moe_intermediate_size": 704,
    "num_attention_heads": 16,
    "num_experts": 128,
    "num_global_key_value_heads": 2,
    "num_hidden_layers": 30,
    "num_key_value_heads": 8,
    "top_k_experts": 8,
}
_OLLAMA = "github.com/ollama/ollama, x/models/gemma4/gemma4_test.go"


def _gemma4(*parts: dict[str, Any], **outer: Any) -> dict[str, Any]:
    text = _GEMMA4_SHAPE
    for part in parts:
        text = text | part
    wrapper = {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "boi_token_id": 255999,
        "dtype": "bfloat16",
        "eoi_token_id": 258882,
        "eos_token_id": [1, 106],
        "image_token_id": 258880,
        "model_type": "gemma4",
        "text_config": text,
        "tie_word_embeddings": True,
        "video_token_id": 258884,
        "vision_config": {"model_type": "gemma4_vision"},
    }
    return wrapper | outer


_SOUND = {
    "audio_config": {"model_type": "gemma4_audio"},
    "audio_token_id": 258881,
    "boa_token_id": 256000,
    "eoa_token_id": 258883,
    "vision_soft_tokens_per_image": 280,
}
_RECALLED = (
    *("boi_token_id", "dtype", "eoi_token_id", "eos_token_id", "image_token_id", "model_type", "tie_word_embeddings"),
    *("video_token_id", "vision_config"),
)
_RECALLED_LARGE = (*_RECALLED, "max_position_embeddings", "use_bidirectional_attention")

# NOTE: totals are of `transformers`' own text models, built without memory. Publishers round: E2B has 2.3 billion
# parameters beside 2.35 of per-layer embeddings, 26B-A4B 25.2, 31B 30.7.
GEMMA_4 = (
    Checkpoint(
        name="google/gemma-4-E2B-it",
        config=_gemma4(
            _GEMMA4_SMALL,
            {
                "hidden_size": 1536,
                "intermediate_size": 6144,
                "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 7,
                "num_hidden_layers": 35,
                "num_key_value_heads": 1,
                "num_kv_shared_layers": 20,
                "use_double_wide_mlp": True,
            },
            **_SOUND,
        ),
        total=4_628_569_379,
        kv_bytes=18_432,
        source=_OLLAMA,
        recalled=(*_RECALLED, *_SOUND),
    ),
    Checkpoint(
        name="google/gemma-4-E4B-it",
        config=_gemma4(
            _GEMMA4_SMALL,
            {
                "enable_moe_block": False,
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "layer_types": _PATTERN * 7,
                "num_hidden_layers": 42,
                "num_key_value_heads": 2,
                "num_kv_shared_layers": 18,
                "use_double_wide_mlp": False,
            },
            **_SOUND,
        ),
        total=7_463_013_418,
        kv_bytes=57_344,
        source=_OLLAMA,
        recalled=(*_RECALLED, *_SOUND),
    ),
    Checkpoint(
        name="google/gemma-4-26B-A4B-it",
        config=_gemma4(_GEMMA4_LARGE, _GEMMA4_26B),
        total=25_233_141_790,
        active=3.8,
        kv_bytes=225_280,
        source=_OLLAMA,
        recalled=_RECALLED_LARGE,
    ),
    Checkpoint(
        name="google/gemma-4-31B-it",
        config=_gemma4(
            _GEMMA4_LARGE,
            {
                "hidden_size": 5376,
                "intermediate_size": 21504,
                "layer_types": _PATTERN * 10,
                "num_attention_heads": 32,
                "num_global_key_value_heads": 4,
                "num_hidden_layers": 60,
                "num_key_value_heads": 16,
            },
        ),
        total=30_697_345_340,
        kv_bytes=901_120,
        source=_OLLAMA,
        recalled=_RECALLED_LARGE,
    ),
    Checkpoint(
        name="google/gemma-4-26B-A4B-it, its text model saved by transformers 5.23",
        config={
            "architectures": ["Gemma4ForCausalLM"],
            **{key: value for key, value in _GEMMA4_SHAPE.items() if key != "global_head_dim"},
            **{key: value for key, value in _GEMMA4_LARGE.items() if key != "hidden_size_per_layer_input"},
            **{key: value for key, value in _GEMMA4_26B.items() if key != "num_global_key_value_heads"},
            "dtype": "bfloat16",
            "hidden_size_per_layer_input": 0,
            "per_layer_config": {str(index): {"head_dim": 512, "num_key_value_heads": 2} for index in range(5, 30, 6)},
            "transformers_version": "5.23.0",
            "vocab_size_per_layer_input": 262144,
        },
        total=25_233_141_790,
        active=3.8,
        kv_bytes=225_280,
    ),
)
