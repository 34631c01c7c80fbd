"""Checkpoints of Qwen 1.5 to 3, and those distilled into them."""

from typing import Any

from tests.unit.architecture.published.checkpoint import BOOKKEEPING, Checkpoint

_QWEN2 = BOOKKEEPING | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.1",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
_SHAPE_7B = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
}
_SHAPE_32B = {
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "num_attention_heads": 40,
    "num_hidden_layers": 64,
    "num_key_value_heads": 8,
}
_CONFIGURATOR = "github.com/ai-dynamo/aiconfigurator, model_configs"
_TENSORRT = "github.com/NVIDIA/TensorRT-LLM, tests of its models"
_MLC = "github.com/mlc-ai/mlc-llm, model_preset.py"
_REPORT = "a public report of the repository's files, with their tensors"

DENSE_2 = (
    Checkpoint(
        name="Qwen/Qwen2-7B-Instruct",
        config=_QWEN2
        | _SHAPE_7B
        | {"max_window_layers": 28, "sliding_window": 131072, "transformers_version": "4.41.2"},
        total=7_615_616_512,
        kv_bytes=57_344,
        source=_MLC,
    ),
    Checkpoint(
        name="Qwen/Qwen2.5-0.5B-Instruct",
        config=_QWEN2
        | {
            "hidden_size": 896,
            "intermediate_size": 4864,
            "max_window_layers": 21,
            "num_attention_heads": 14,
            "num_hidden_layers": 24,
            "num_key_value_heads": 2,
            "sliding_window": 32768,
            "tie_word_embeddings": True,
            "vocab_size": 151936,
        },
        total=494_032_768,
        kv_bytes=12_288,
        source="github.com/aws-neuron/neuronx-distributed-inference, tests",
        recalled=("num_hidden_layers",),
    ),
    Checkpoint(
        name="Qwen/Qwen2.5-7B-Instruct",
        config=_QWEN2 | _SHAPE_7B | {"max_window_layers": 28, "sliding_window": 131072},
        total=7_615_616_512,
        kv_bytes=57_344,
        source="github.com/inference-sim/inference-sim, model_configs",
    ),
    Checkpoint(
        name="Qwen/Qwen2.5-72B-Instruct",
        config=_QWEN2
        | {
            "hidden_size": 8192,
            "intermediate_size": 29568,
            "max_window_layers": 70,
            "num_attention_heads": 64,
            "num_hidden_layers": 80,
            "num_key_value_heads": 8,
            "sliding_window": 131072,
        },
        total=72_706_203_648,
        kv_bytes=327_680,
        source=_REPORT,
    ),
    Checkpoint(
        name="Qwen/Qwen2.5-Coder-32B-Instruct",
        config=_QWEN2 | _SHAPE_32B | {"max_window_layers": 70, "sliding_window": 131072},
        total=32_763_876_352,
        kv_bytes=262_144,
        source="github.com/Lightning-AI/litgpt, config.py",
        recalled=("max_window_layers", "rms_norm_eps", "sliding_window", "use_sliding_window"),
    ),
    Checkpoint(
        name="Qwen/QwQ-32B",
        config=_QWEN2
        | _SHAPE_32B
        | {
            "max_position_embeddings": 131072,
            "max_window_layers": 64,
            "rms_norm_eps": 1e-05,
            "sliding_window": 32768,
        },
        total=32_763_876_352,
        kv_bytes=262_144,
        source=_REPORT,
    ),
    Checkpoint(
        name="deepseek-ai/DeepSeek-R1-Distill-Qwen-7B",
        config=_QWEN2
        | _SHAPE_7B
        | {
            "eos_token_id": 151643,
            "max_position_embeddings": 131072,
            "max_window_layers": 28,
            "rope_theta": 10000,
            "sliding_window": 4096,
            "transformers_version": "4.44.0",
            "use_mrope": False,
        },
        total=7_615_616_512,
        kv_bytes=57_344,
        source="a public copy of the file in notes on its use",
    ),
    Checkpoint(
        name="deepseek-ai/DeepSeek-R1-Distill-Qwen-32B",
        config=_QWEN2
        | _SHAPE_32B
        | {
            "eos_token_id": 151643,
            "max_position_embeddings": 131072,
            "max_window_layers": 64,
            "rms_norm_eps": 1e-05,
            "sliding_window": 131072,
        },
        total=32_763_876_352,
        kv_bytes=262_144,
        source="a public copy of the file in a calculation of sizes",
        recalled=("architectures", "tie_word_embeddings", "use_cache", "use_sliding_window"),
    ),
)

_QWEN2_MOE = _QWEN2 | {
    "architectures": ["Qwen2MoeForCausalLM"],
    "model_type": "qwen2_moe",
    "decoder_sparse_step": 1,
    "norm_topk_prob": False,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "vocab_size": 151936,
}

MIXTURES_2 = (
    Checkpoint(
        name="Qwen/Qwen1.5-MoE-A2.7B-Chat",
        config=_QWEN2_MOE
        | {
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "max_window_layers": 21,
            "moe_intermediate_size": 1408,
            "num_attention_heads": 16,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "num_hidden_layers": 24,
            "num_key_value_heads": 16,
            "shared_expert_intermediate_size": 5632,
            "sliding_window": 32768,
            "transformers_version": "4.39.0.dev0",
        },
        total=14_315_784_192,
        active=2.7,
        kv_bytes=196_608,
        source=_MLC,
    ),
    Checkpoint(
        name="Qwen/Qwen2-57B-A14B",
        config=_QWEN2_MOE
        | _SHAPE_7B
        | {
            "eos_token_id": 151643,
            "max_position_embeddings": 131072,
            "max_window_layers": 28,
            "moe_intermediate_size": 2560,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "shared_expert_intermediate_size": 20480,
            "sliding_window": 131072,
            "transformers_version": "4.40.1",
        },
        total=57.41e9,
        is_count=False,
        active=14,
        kv_bytes=57_344,
        source=_TENSORRT,
    ),
)

_QWEN3 = BOOKKEEPING | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
_SHAPE_8B = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_window_layers": 36,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
}

DENSE_3 = (
    Checkpoint(
        name="Qwen/Qwen3-0.6B",
        config=_QWEN3
        | {
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "max_window_layers": 28,
            "num_attention_heads": 16,
            "num_hidden_layers": 28,
            "tie_word_embeddings": True,
        },
        total=751_632_384 - 151936 * 1024,  # NOTE: the file holds embedding and head, which are one table
        kv_bytes=114_688,
        source=_CONFIGURATOR,
    ),
    Checkpoint(
        name="Qwen/Qwen3-8B",
        config=_QWEN3 | _SHAPE_8B,
        total=8_190_735_360,
        kv_bytes=147_456,
        source=_CONFIGURATOR,
    ),
    Checkpoint(
        name="Qwen/Qwen3-32B",
        config=_QWEN3
        | {
            "hidden_size": 5120,
            "intermediate_size": 25600,
            "max_window_layers": 64,
            "num_attention_heads": 64,
            "num_hidden_layers": 64,
        },
        total=32_762_123_264,
        kv_bytes=262_144,
        source=_CONFIGURATOR,
    ),
    Checkpoint(
        name="deepseek-ai/DeepSeek-R1-0528-Qwen3-8B",
        config=_QWEN3
        | _SHAPE_8B
        | {
            "max_position_embeddings": 131072,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32768,
                "attn_factor": 0.8782488562869419,
            },
        },
        refused="attn_factor=0.8782488562869419 is not served; supported: no value but 1: transformers ignores it and "
        "multiplies by 1.13863, other engines multiply by 1;",
        source="a public copy of the file in a calculation of sizes",
    ),
)

_QWEN3_MOE: dict[str, Any] = _QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
}
_SHAPE_30B = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_window_layers": 48,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_hidden_layers": 48,
}
_SHAPE_235B = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_window_layers": 94,
    "moe_intermediate_size": 1536,
    "num_attention_heads": 64,
    "num_hidden_layers": 94,
}


def _coder(**keys: Any) -> dict[str, Any]:
    """Qwen3-Coder: no keys of attention's bias, and three that name what it does without."""
    config = {key: value for key, value in _QWEN3_MOE.items() if key not in ("attention_bias", "bos_token_id")}
    return {
        **config,
        "max_position_embeddings": 262144,
        "qkv_bias": False,
        "rope_theta": 10000000,
        "router_aux_loss_coef": 0.0,
        "shared_expert_intermediate_size": 0,
        "use_qk_norm": True,
        **keys,
    }


MIXTURES_3 = (
    Checkpoint(
        name="Qwen/Qwen3-30B-A3B",
        config=_QWEN3_MOE | _SHAPE_30B,
        total=30_532_122_624,
        active=3.3,
        kv_bytes=98_304,
        source=_CONFIGURATOR,
    ),
    Checkpoint(
        name="Qwen/Qwen3-30B-A3B-Instruct-2507",
        config=_QWEN3_MOE | _SHAPE_30B | {"max_position_embeddings": 262144, "rope_theta": 10000000},
        total=30_532_122_624,
        active=3.3,
        kv_bytes=98_304,
        source="github.com/casys-kaist/LLMServingSim, configs/model",
    ),
    Checkpoint(
        name="Qwen/Qwen3-30B-A3B-FP8",
        config=_QWEN3_MOE
        | _SHAPE_30B
        | {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}},
        total=30_532_122_624,
        active=3.3,
        kv_bytes=98_304,
        source=_CONFIGURATOR,
    ),
    Checkpoint(
        name="Qwen/Qwen3-235B-A22B",
        config=_QWEN3_MOE | _SHAPE_235B,
        total=235_093_634_560,
        active=22,
        kv_bytes=192_512,
        source=_CONFIGURATOR,
    ),
    Checkpoint(
        name="Qwen/Qwen3-235B-A22B-Thinking-2507",
        config=_QWEN3_MOE | _SHAPE_235B | {"max_position_embeddings": 262144, "rope_theta": 5000000.0},
        total=235_093_634_560,
        active=22,
        kv_bytes=192_512,
        source="github.com/AI-Hypercomputer/maxtext, hf_model_configs.py",
        recalled=("use_sliding_window",),
    ),
    Checkpoint(
        name="Qwen/Qwen3-Coder-30B-A3B-Instruct",
        config=_coder(**_SHAPE_30B | {"intermediate_size": 5472, "max_window_layers": 28}),
        total=30_532_122_624,
        active=3.3,
        kv_bytes=98_304,
    ),
    Checkpoint(
        name="Qwen/Qwen3-Coder-480B-A35B-Instruct",
        config=_coder(
            hidden_size=6144,
            intermediate_size=8192,
            max_window_layers=62,
            moe_intermediate_size=2560,
            num_attention_heads=96,
            num_experts=160,
            num_hidden_layers=62,
            num_key_value_heads=8,
        ),
        total=480_154_875_392,
        active=35,
        kv_bytes=253_952,
        source=_CONFIGURATOR,
    ),
)
