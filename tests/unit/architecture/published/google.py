"""Checkpoints of Gemma 3: a text model, and text models inside multimodal ones."""

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
