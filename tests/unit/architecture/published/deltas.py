"""Hybrids with the gated delta rule, of Qwen and Moonshot AI. Their totals are rounded, mostly those of the names."""

from typing import Any

from tests.unit.architecture.published.checkpoint import BOOKKEEPING, Checkpoint

_PATTERN = [*["linear_attention"] * 3, "full_attention"]
_DELTA: dict[str, Any] = BOOKKEEPING | {
    "full_attention_interval": 4,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-06,
    "use_cache": True,
}
_TEXT: dict[str, Any] = _DELTA | {
    "attention_bias": False,
    "attn_output_gate": True,
    "dtype": "bfloat16",
    "eos_token_id": 248044,
    "mamba_ssm_dtype": "float32",
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
    "vocab_size": 248320,
}
_KIMI_FULL = [4, 8, 12, 16, 20, 24, 27]
_IMAGES = {
    "image_token_id": 248056,
    "video_token_id": 248057,
    "vision_end_token_id": 248054,
    "vision_start_token_id": 248053,
}
_VISION = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "patch_size": 16}
_9B = _TEXT | {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "layer_types": _PATTERN * 8,
    "linear_num_value_heads": 32,
    "model_type": "qwen3_5_text",
    "num_attention_heads": 16,
    "num_hidden_layers": 32,
    "num_key_value_heads": 4,
}
_27B = _TEXT | {
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "layer_types": _PATTERN * 16,
    "linear_num_value_heads": 48,
    "model_type": "qwen3_5_text",
    "num_attention_heads": 24,
    "num_hidden_layers": 64,
    "num_key_value_heads": 4,
}
_MIXTURE = _TEXT | {
    "linear_num_value_heads": 64,
    "model_type": "qwen3_5_moe_text",
    "moe_intermediate_size": 1024,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 1024,
}
_122B = _MIXTURE | {
    "hidden_size": 3072,
    "layer_types": _PATTERN * 12,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
}
_397B = _MIXTURE | {
    "hidden_size": 4096,
    "layer_types": _PATTERN * 15,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 60,
}


def _wrapped(architecture: str, model_type: str, text: dict[str, Any]) -> dict[str, Any]:
    """The file of a multimodal checkpoint."""
    vision = _VISION | {"model_type": model_type, "out_hidden_size": text["hidden_size"]}
    outer = {"architectures": [architecture], "model_type": model_type, "tie_word_embeddings": False}
    return _IMAGES | outer | {"text_config": text, "vision_config": vision}


DELTA = (
    Checkpoint(
        name="Qwen/Qwen3-Next-80B-A3B-Instruct",
        config=_DELTA
        | {
            "architectures": ["Qwen3NextForCausalLM"],
            "bos_token_id": 151643,
            "decoder_sparse_step": 1,
            "eos_token_id": 151645,
            "hidden_size": 2048,
            "intermediate_size": 5120,
            "linear_num_value_heads": 32,
            "mlp_only_layers": [],
            "model_type": "qwen3_next",
            "moe_intermediate_size": 512,
            "norm_topk_prob": True,
            "num_attention_heads": 16,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "num_hidden_layers": 48,
            "num_key_value_heads": 2,
            "output_router_logits": False,
            "partial_rotary_factor": 0.25,
            "rope_scaling": None,
            "rope_theta": 10000000,
            "router_aux_loss_coef": 0.001,
            "shared_expert_intermediate_size": 512,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "transformers_version": "4.57.0.dev0",
            "use_sliding_window": False,
            "vocab_size": 151936,
        },
        total=80e9,
        is_count=False,
        kv_bytes=24_576,
    ),
    Checkpoint(
        name="Qwen/Qwen3.5-9B",
        config=_wrapped("Qwen3_5ForConditionalGeneration", "qwen3_5", _9B),
        total=9e9,
        is_count=False,
        kv_bytes=32_768,
    ),
    Checkpoint(
        name="Qwen/Qwen3.5-27B, its text model saved by transformers 5.23",
        config=_27B | {"architectures": ["Qwen3_5ForCausalLM"], "transformers_version": "5.23.0"},
        total=27e9,
        is_count=False,
    ),
    Checkpoint(
        name="Qwen/Qwen3.5-397B-A17B",
        config=_wrapped("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe", _397B),
        total=397e9,
        is_count=False,
        active=17.0,
    ),
    Checkpoint(
        name="Qwen/Qwen3.5-122B-A10B, its text model saved by transformers 5.23",
        config=_122B | {"architectures": ["Qwen3_5MoeForCausalLM"], "transformers_version": "5.23.0"},
        total=122e9,  # NOTE: its publisher rounds 9.8 active ones to 10
        is_count=False,
    ),
    Checkpoint(
        name="moonshotai/Kimi-Linear-48B-A3B-Instruct",
        config={
            "architectures": ["KimiLinearForCausalLM"],
            "bos_token_id": 163584,
            "dtype": "bfloat16",
            "eos_token_id": 163586,
            "first_k_dense_replace": 1,
            "head_dim": 72,
            "hidden_act": "silu",
            "hidden_size": 2304,
            "initializer_range": 0.02,
            "intermediate_size": 9216,
            "kv_lora_rank": 512,
            "linear_attn_config": {
                "full_attn_layers": _KIMI_FULL,
                "head_dim": 128,
                "kda_layers": [number for number in range(1, 28) if number not in _KIMI_FULL],
                "num_heads": 32,
                "short_conv_kernel_size": 4,
            },
            "mla_use_nope": True,
            "model_max_length": 1048576,
            "model_type": "kimi_linear",
            "moe_intermediate_size": 1024,
            "moe_layer_freq": 1,
            "moe_renormalize": True,
            "moe_router_activation_func": "sigmoid",
            "num_attention_heads": 32,
            "num_expert_group": 1,
            "num_experts": 256,
            "num_experts_per_token": 8,
            "num_hidden_layers": 27,
            "num_key_value_heads": 32,
            "num_nextn_predict_layers": 0,
            "num_shared_experts": 1,
            "pad_token_id": 163839,
            "q_lora_rank": None,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "rms_norm_eps": 1e-05,
            "rope_scaling": None,
            "rope_theta": 10000.0,
            "routed_scaling_factor": 2.446,
            "tie_word_embeddings": False,
            "topk_group": 1,
            "use_cache": True,
            "use_grouped_topk": True,
            "v_head_dim": 128,
            "vocab_size": 163840,
        },
        total=49e9,  # NOTE: as the hub rounds it
        is_count=False,
        kv_bytes=8_064,
    ),
)
