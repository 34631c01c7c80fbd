"""Configurations of tiny models, as keyword arguments of the configuration classes of transformers."""

from typing import Any

SIZES: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

MINISTRAL3: dict[str, Any] = SIZES | {
    "head_dim": 32,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 16.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.4,
    },
}
LATENT: dict[str, Any] = SIZES | {
    "num_key_value_heads": 4,
    "q_lora_rank": 40,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.0,
    },
}
INDEXED: dict[str, Any] = {
    "index_topk": 9,
    "index_head_dim": 24,
    "index_n_heads": 16,
}
"""What a model has beside `LATENT` whose queries choose."""
DEEPSEEK_V4: dict[str, Any] = {key: value for key, value in SIZES.items() if key != "intermediate_size"} | {
    "num_hidden_layers": 4,
    "layer_types": [
        *("sliding_attention", "compressed_sparse_attention"),
        *("heavily_compressed_attention", "compressed_sparse_attention"),
    ],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    "mlp_layer_types": ["hash_moe", "hash_moe", "moe", "moe"],
    "num_key_value_heads": 1,
    "head_dim": 32,
    "partial_rotary_factor": 0.25,
    "q_lora_rank": 40,
    "sliding_window": 12,
    "o_groups": 2,
    "o_lora_rank": 24,
    "index_n_heads": 8,
    "index_head_dim": 16,
    "index_topk": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "swiglu_limit": 1.5,
    "hc_mult": 3,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    },
}
MISTRAL4: dict[str, Any] = LATENT | {
    "n_group": 4,
    "topk_group": 2,
    "rope_parameters": LATENT["rope_parameters"]
    | {"llama_4_scaling_beta": 0.4, "original_max_position_embeddings": 16},
}
GEMMA3: dict[str, Any] = SIZES | {
    "initializer_range": 0.06,  # NOTE: embeddings are scaled up and tied; wider, every token predicts itself
    "head_dim": 16,
    "sliding_window": 10,
    "query_pre_attn_scalar": 24,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}
GEMMA2: dict[str, Any] = {key: value for key, value in GEMMA3.items() if key != "layer_types"} | {
    "attn_logit_softcapping": 2.0,  # NOTE: that of published models is far above a tiny one's scores
    "final_logit_softcapping": 3.0,
}
GEMMA4: dict[str, Any] = SIZES | {
    "initializer_range": 0.06,  # NOTE: as for Gemma 3
    "num_hidden_layers": 5,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 32,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "sliding_window": 10,
    "layer_types": [*["sliding_attention"] * 2, "full_attention", "sliding_attention", "full_attention"],
}
