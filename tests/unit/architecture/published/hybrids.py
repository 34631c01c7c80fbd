"""Hybrids of recurrent and attention layers, of Liquid AI and IBM.

Public copies of parts of the files confirm the shapes of Granite 4 H Tiny and Micro; their other keys are from memory.
"""

from typing import Any

from tests.unit.architecture.published.checkpoint import BOOKKEEPING, Checkpoint

_CONV, _FULL = "conv", "full_attention"
_WIDTH_2B = {
    "block_dim": 2048,
    "conv_dim": 2048,
    "conv_dim_out": 2048,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_heads": 32,
}
_WIDTH_1B = {
    "block_dim": 1024,
    "conv_dim": 1024,
    "conv_dim_out": 1024,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_heads": 16,
}
_LFM2: dict[str, Any] = {
    "architectures": ["Lfm2ForCausalLM"],
    "block_auto_adjust_ff_dim": True,
    "block_ffn_dim_multiplier": 1.0,
    "block_mlp_init_scale": 1.0,
    "block_multiple_of": 256,
    "block_norm_eps": 1e-05,
    "block_out_init_scale": 1.0,
    "block_use_swiglu": True,
    "block_use_xavier_init": True,
    "bos_token_id": 1,
    "conv_L_cache": 3,
    "conv_bias": False,
    "conv_use_xavier_init": True,
    "eos_token_id": 7,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "initializer_range": 0.02,
    "max_position_embeddings": 128000,
    "model_type": "lfm2",
    "norm_eps": 1e-05,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pad_token_id": 0,
    "rope_theta": 1000000.0,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.54.0.dev0",
    "use_cache": True,
    "use_pos_enc": True,
    "vocab_size": 65536,
}
_LFM2_MOE: dict[str, Any] = {
    "architectures": ["Lfm2MoeForCausalLM"],
    "bos_token_id": 1,
    "conv_L_cache": 3,
    "conv_bias": False,
    "dtype": "bfloat16",
    "eos_token_id": 7,
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 7168,
    "layer_types": [_FULL if index in (2, 6, 10, 14, 18, 21) else _CONV for index in range(24)],
    "max_position_embeddings": 128000,
    "model_type": "lfm2_moe",
    "moe_intermediate_size": 1792,
    "norm_eps": 1e-05,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_dense_layers": 2,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "pad_token_id": 0,
    "rope_theta": 1000000.0,
    "routed_scaling_factor": 1.0,
    "use_cache": True,
    "use_expert_bias": True,
    "vocab_size": 65536,
}
_ENGINE_TESTS = "public copies of a part of the file in engines' tests"

LFM2 = (
    Checkpoint(
        name="LiquidAI/LFM2-350M",
        config=_LFM2 | _WIDTH_1B | {"block_ff_dim": 6656},
        total=354_483_968,
        kv_bytes=6 * 2 * 8 * 64 * 2,
    ),
    Checkpoint(
        name="LiquidAI/LFM2-1.2B",
        config=_LFM2 | _WIDTH_2B | {"block_ff_dim": 12288},
        total=1_170_340_608,
        kv_bytes=6 * 2 * 8 * 64 * 2,
        source="a public copy of the file in an engine's tests",
        recalled=("transformers_version",),
    ),
    Checkpoint(
        name="LiquidAI/LFM2-8B-A1B",
        config=_LFM2_MOE,
        total=8_339_929_856 + 22 * 32,  # with the experts' biases in float32
        active=1.5,
        kv_bytes=6 * 2 * 8 * 64 * 2,
        source=_ENGINE_TESTS,
        recalled=("architectures", "bos_token_id", "dtype", "initializer_range", "pad_token_id", "use_cache"),
    ),
)

_GRANITE_4: dict[str, Any] = BOOKKEEPING | {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 100257,
    "embedding_multiplier": 12,
    "eos_token_id": 100257,
    "init_method": "mup",
    "initializer_range": 0.1,
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_proj_bias": False,
    "max_position_embeddings": 131072,
    "model_type": "granitemoehybrid",
    "normalization_function": "rmsnorm",
    "num_hidden_layers": 40,
    "output_router_logits": False,
    "pad_token_id": 100256,
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.56.0",
    "use_cache": True,
    "vocab_size": 100352,
}
_HYBRID = {
    "layer_types": ["attention" if index in (5, 15, 25, 35) else "mamba" for index in range(40)],
    "position_embedding_type": "nope",
}
_DENSE = {"num_experts_per_tok": 0, "num_local_experts": 0, "router_aux_loss_coef": 0.01}

GRANITE_4 = (
    Checkpoint(
        name="ibm-granite/granite-4.0-h-micro",
        config=_GRANITE_4
        | _HYBRID
        | _DENSE
        | {
            "attention_multiplier": 0.015625,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "logits_scaling": 8,
            "mamba_n_heads": 64,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "shared_intermediate_size": 8192,
        },
        total=3_191_396_096,
        kv_bytes=4 * 2 * 8 * 64 * 2,
    ),
    Checkpoint(
        name="ibm-granite/granite-4.0-h-tiny",
        config=_GRANITE_4
        | _HYBRID
        | {
            "attention_multiplier": 0.0078125,
            "hidden_size": 1536,
            "intermediate_size": 512,
            "logits_scaling": 6,
            "mamba_n_heads": 48,
            "num_attention_heads": 12,
            "num_experts_per_tok": 6,
            "num_key_value_heads": 4,
            "num_local_experts": 64,
            "router_aux_loss_coef": 0.0,
            "shared_intermediate_size": 1024,
        },
        total=6_939_037_248,  # NOTE: the card says 1B active, which is 1.3 without any table
        kv_bytes=4 * 2 * 4 * 128 * 2,
    ),
    Checkpoint(
        name="ibm-granite/granite-4.0-h-small",
        config=_GRANITE_4
        | _HYBRID
        | {
            "attention_multiplier": 0.0078125,
            "hidden_size": 4096,
            "intermediate_size": 768,
            "logits_scaling": 16,
            "mamba_n_heads": 128,
            "num_attention_heads": 32,
            "num_experts_per_tok": 10,
            "num_key_value_heads": 8,
            "num_local_experts": 72,
            "router_aux_loss_coef": 0.0,
            "shared_intermediate_size": 1536,
        },
        total=32_207_337_984,
        active=9.0,
        kv_bytes=16_384,
    ),
    Checkpoint(
        name="ibm-granite/granite-4.0-micro",
        config=_GRANITE_4
        | _DENSE
        | {
            "attention_multiplier": 0.015625,
            "hidden_size": 2560,
            "intermediate_size": 8192,
            "layer_types": ["attention"] * 40,
            "logits_scaling": 10,
            "mamba_n_heads": 80,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "position_embedding_type": "rope",
            "rope_theta": 10000000,
            "shared_intermediate_size": 8192,
        },
        total=3_402_836_480,
        kv_bytes=40 * 2 * 8 * 64 * 2,
    ),
)
