"""Mixtures of experts of Zhipu, MiniMax and OpenAI."""

from typing import Any

from tests.unit.architecture.published.checkpoint import BOOKKEEPING, Checkpoint

_CONFIGURATOR = "github.com/ai-dynamo/aiconfigurator, model_configs"
_GLM: dict[str, Any] = BOOKKEEPING | {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "attention_bias": True,
    "eos_token_id": [151329, 151336, 151338],
    "head_dim": 128,
    "n_group": 1,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "pad_token_id": 151329,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.54.0",
    "use_cache": True,
    "vocab_size": 151552,
}
_SHAPE_355B = {
    "first_k_dense_replace": 3,
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 160,
    "num_hidden_layers": 92,
    "routed_scaling_factor": 2.5,
    "use_qk_norm": True,
}
_FURTHER_LAYER_355B = 3_988_069_792
"""Parameters of the layer that predicts further tokens. Files count it, and GLM 4.5 its copies of both tables."""

GLM = (
    Checkpoint(
        name="zai-org/GLM-4.5",
        config=_GLM | _SHAPE_355B | {"max_position_embeddings": 131072},
        total=358_337_791_296 - _FURTHER_LAYER_355B - 2 * 151552 * 5120,
        active=32,
        kv_bytes=376_832,
        source="github.com/alibaba/rtp-llm, tests",
    ),
    Checkpoint(
        name="zai-org/GLM-4.5-Air",
        config=_GLM
        | {
            "first_k_dense_replace": 1,
            "hidden_size": 4096,
            "intermediate_size": 10944,
            "max_position_embeddings": 131072,
            "moe_intermediate_size": 1408,
            "n_routed_experts": 128,
            "num_hidden_layers": 46,
            "routed_scaling_factor": 1.0,
            "use_qk_norm": False,
        },
        total=110_468_824_832 - 2_375_059_584 - 2 * 151552 * 4096,
        active=12,
        kv_bytes=188_416,
        source="github.com/NVIDIA-NeMo/Megatron-Bridge, tests",
        recalled=("eos_token_id", "pad_token_id", "num_nextn_predict_layers", "routed_scaling_factor"),
    ),
    Checkpoint(
        name="zai-org/GLM-4.6",
        config=_GLM | _SHAPE_355B | {"max_position_embeddings": 202752},
        total=357e9 - _FURTHER_LAYER_355B,
        is_count=False,
        active=32,
        kv_bytes=376_832,
    ),
)

_MINIMAX: dict[str, Any] = {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "model_type": "minimax_m2",
    "attn_type_list": [1] * 62,
    "auto_map": {
        "AutoConfig": "configuration_minimax_m2.MiniMaxM2Config",
        "AutoModelForCausalLM": "modeling_minimax_m2.MiniMaxM2ForCausalLM",
    },
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "max_position_embeddings": 196608,
    "mtp_transformer_layers": 1,
    "num_attention_heads": 48,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 62,
    "num_key_value_heads": 8,
    "num_local_experts": 256,
    "num_mtp_modules": 3,
    "qk_norm_type": "per_layer",
    "quantization_config": {"quant_method": "fp8", "fmt": "float8_e4m3fn", "weight_block_size": [128, 128]},
    "rms_norm_eps": 1e-06,
    "rope_theta": 5000000,
    "rotary_dim": 64,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "tie_word_embeddings": False,
    "transformers_version": "4.46.1",
    "use_cache": True,
    "use_mtp": True,
    "use_qk_norm": True,
    "use_routing_bias": True,
    "vocab_size": 200064,
}
_MINIMAX_TOTAL = 228_703_644_928 - 13_880_064
"""Without the scales of its 8-bit weights."""

MINIMAX = (
    Checkpoint(
        name="MiniMaxAI/MiniMax-M2",
        config=_MINIMAX
        | {
            "attention_dropout": 0.0,
            "mlp_intermediate_size": 8192,
            "output_router_logits": False,
            "router_aux_loss_coef": 0.001,
            "router_jitter_noise": 0.0,
            "sliding_window": None,
        },
        total=_MINIMAX_TOTAL,
        active=10,
        kv_bytes=253_952,
        warned=("mlp_intermediate_size",),
        source="a public copy in an engine's tests",
        recalled=("auto_map", "num_mtp_modules", "mtp_transformer_layers", "output_router_logits", "use_mtp"),
    ),
    Checkpoint(
        name="MiniMaxAI/MiniMax-M2.5",
        config={key: value for key, value in _MINIMAX.items() if key != "attn_type_list"},
        total=_MINIMAX_TOTAL,
        active=10,
        kv_bytes=253_952,
        source=_CONFIGURATOR,
    ),
    Checkpoint(
        name="MiniMaxAI/MiniMax-M2.7",
        config=_MINIMAX | {"dtype": "bfloat16", "max_position_embeddings": 204800},
        total=_MINIMAX_TOTAL,
        active=10,
        kv_bytes=253_952,
        source="a public report of the repository's files, with their tensors",
    ),
)

_MINIMAX_M3_LAYERS = [0] * 3 + [1] * 57
MINIMAX_M3 = (
    Checkpoint(
        name="MiniMaxAI/MiniMax-M3",
        config={
            "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
            "model_type": "minimax_m3_vl",
            "image_token_index": 200025,
            "vision_config": {"model_type": "clip_vision_model", "hidden_size": 1280, "num_hidden_layers": 32},
            "text_config": {
                "architectures": ["MiniMaxM3SparseForCausalLM"],
                "dense_intermediate_size": 12288,
                "head_dim": 128,
                "hidden_act": "swigluoai",
                "hidden_size": 6144,
                "intermediate_size": 3072,
                "max_position_embeddings": 524288,
                "moe_layer_freq": _MINIMAX_M3_LAYERS,
                "n_shared_experts": 1,
                "num_attention_heads": 64,
                "num_experts_per_tok": 4,
                "num_hidden_layers": 60,
                "num_key_value_heads": 4,
                "num_local_experts": 128,
                "num_mtp_modules": 7,
                "num_nextn_predict_layers": 1,
                "partial_rotary_factor": 0.5,
                "qk_norm_type": "per_head",
                "rms_norm_eps": 1e-06,
                "rope_theta": 5000000,
                "rotary_dim": 64,
                "routed_scaling_factor": 2.0,
                "scoring_func": "sigmoid",
                "shared_intermediate_size": 3072,
                "sparse_attention_config": {
                    "use_sparse_attention": True,
                    "sparse_attention_freq": _MINIMAX_M3_LAYERS,
                    "sparse_block_size": 128,
                    "sparse_disable_index_value": _MINIMAX_M3_LAYERS,
                    "sparse_index_dim": 128,
                    "sparse_init_block": 0,
                    "sparse_local_block": 1,
                    "sparse_num_index_heads": 4,
                    "sparse_score_type": "max",
                    "sparse_topk_blocks": 16,
                },
                "swiglu_alpha": 1.702,
                "swiglu_limit": 7.0,
                "tie_word_embeddings": False,
                "use_gemma_norm": True,
                "use_qk_norm": True,
                "use_routing_bias": True,
                "vocab_size": 200064,
            },
        },
        total=427e9,  # NOTE: 428 with the vision tower; 23 are called active, of 23.5 without tables
        is_count=False,
        kv_bytes=60 * 2048 + 57 * 256,
        source="public copies in the tests of three engines, which agree",
    ),
)


def _gpt_oss(num_layers: int, num_experts: int) -> dict[str, Any]:
    return {
        **BOOKKEEPING,
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "attention_bias": True,
        "eos_token_id": 200002,
        "experts_per_token": 4,
        "head_dim": 64,
        "hidden_size": 2880,
        "initial_context_length": 4096,
        "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * (num_layers // 2),
        "max_position_embeddings": 131072,
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": num_layers,
        "num_key_value_heads": 8,
        "num_local_experts": num_experts,
        "output_router_logits": False,
        "pad_token_id": 199999,
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "router_aux_loss_coef": 0.9,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "transformers_version": "4.55.0.dev0",
        "use_cache": True,
        "vocab_size": 201088,
    }


GPT_OSS = (
    Checkpoint(
        name="openai/gpt-oss-20b",
        config=_gpt_oss(num_layers=24, num_experts=32),
        total=20_914_757_184,
        active=3.6,
        kv_bytes=49_152,
        source=_CONFIGURATOR,
    ),
    Checkpoint(
        name="openai/gpt-oss-120b",
        config=_gpt_oss(num_layers=36, num_experts=128),
        total=116_829_156_672,
        active=5.1,
        kv_bytes=73_728,
        source=_CONFIGURATOR,
    ),
)
