"""Catalogue of well-known models by name, for capacity planning without a checkpoint or a network.

Each row holds the part of the model's published `config.json` that decides its cost. `dense-30b` is made up: Qwen3-32B
with 58 layers instead of 64, which has 30 billion parameters.
"""

from collections.abc import Mapping
from types import MappingProxyType

from tandem.architecture.cost import ModelCost, read_cost
from tandem.core.errors import ConfigurationError, shown

_COLUMNS = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "tie_word_embeddings",
)
_NO_WINDOW = {"sliding_window": None}
_LARGE_GEMMA_4 = {"sliding_window": 1024, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0}
_ROWS: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "qwen3-0.6b": ("qwen3", 1024, 3072, 28, 16, 8, 128, 151_936, 40_960, True),
        "qwen3-4b": ("qwen3", 2560, 9728, 36, 32, 8, 128, 151_936, 40_960, True),
        "qwen3-8b": ("qwen3", 4096, 12_288, 36, 32, 8, 128, 151_936, 40_960, False),
        "qwen3-14b": ("qwen3", 5120, 17_408, 40, 40, 8, 128, 151_936, 40_960, False),
        "qwen3-32b": ("qwen3", 5120, 25_600, 64, 64, 8, 128, 151_936, 40_960, False),
        "qwen3-30b-a3b": ("qwen3_moe", 2048, 6144, 48, 32, 4, 128, 151_936, 40_960, False),
        "qwen2.5-7b": ("qwen2", 3584, 18_944, 28, 28, 4, 128, 152_064, 32_768, False),
        "llama-3-8b": ("llama", 4096, 14_336, 32, 32, 8, 128, 128_256, 131_072, False),
        "llama-3-70b": ("llama", 8192, 28_672, 80, 64, 8, 128, 128_256, 131_072, False),
        "mistral-7b": ("mistral", 4096, 14_336, 32, 32, 8, 128, 32_768, 32_768, False),
        "mixtral-8x7b": ("mixtral", 4096, 14_336, 32, 32, 8, 128, 32_000, 32_768, False),
        "gemma-3-27b": ("gemma3_text", 5376, 21_504, 62, 32, 16, 128, 262_208, 131_072, True),
        "gemma-4-e2b": ("gemma4_text", 1536, 6144, 35, 8, 1, 256, 262_144, 131_072, True),
        "gemma-4-26b-a4b": ("gemma4_text", 2816, 2112, 30, 16, 8, 256, 262_144, 262_144, True),
        "gemma-4-31b": ("gemma4_text", 5376, 21_504, 60, 32, 16, 256, 262_144, 262_144, True),
        "deepseek-v2-lite": ("deepseek_v2", 2048, 10_944, 27, 16, 16, 64, 102_400, 163_840, False),
        "deepseek-v3": ("deepseek_v3", 7168, 18_432, 61, 128, 128, 64, 129_280, 163_840, False),
        "deepseek-v3.2": ("deepseek_v32", 7168, 18_432, 61, 128, 128, 64, 129_280, 163_840, False),
        "deepseek-v4-flash": ("deepseek_v4", 4096, 2048, 43, 64, 1, 512, 129_280, 1_048_576, False),
        "glm-5": ("glm_moe_dsa", 6144, 12_288, 78, 64, 64, 64, 154_880, 202_752, False),
        "glm-4.7-flash": ("glm4_moe_lite", 2048, 10_240, 47, 20, 20, 64, 154_880, 202_752, False),
        "falcon-h1-7b": ("falcon_h1", 3072, 12_288, 44, 12, 2, 128, 130_048, 262_144, False),
        "jamba-v0.1": ("jamba", 4096, 14_336, 32, 32, 8, 128, 65_536, 262_144, False),
        "nemotron-3-super": ("nemotron_h", 4096, 2688, 88, 32, 2, 128, 131_072, 262_144, False),
        "glm-4.5-air": ("glm4_moe", 4096, 10_944, 46, 96, 8, 128, 151_552, 131_072, False),
        "gpt-oss-20b": ("gpt_oss", 2880, 2880, 24, 64, 8, 64, 201_088, 131_072, False),
        "gpt-oss-120b": ("gpt_oss", 2880, 2880, 36, 64, 8, 64, 201_088, 131_072, False),
        "minimax-m2": ("minimax_m2", 3072, 1536, 62, 48, 8, 128, 200_064, 196_608, False),
        "minimax-m3": ("minimax_m3_vl_text", 6144, 3072, 60, 64, 4, 128, 200_064, 524_288, False),
        "olmo-3-7b": ("olmo3", 4096, 11_008, 32, 32, 32, 128, 100_278, 65_536, False),
        "phi-4": ("phi3", 5120, 17_920, 40, 40, 10, 128, 100_352, 16_384, False),
        "dense-30b": ("qwen3", 5120, 25_600, 58, 64, 8, 128, 151_936, 40_960, False),
    }
)
_MORE: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        "qwen3-30b-a3b": {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
        "mistral-7b": _NO_WINDOW,
        "mixtral-8x7b": {"num_local_experts": 8, "num_experts_per_tok": 2},
        "gemma-3-27b": {"sliding_window": 1024},
        "gemma-4-e2b": {
            "num_kv_shared_layers": 20,
            "use_double_wide_mlp": True,
            "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 7,
        },
        "gemma-4-26b-a4b": {
            **_LARGE_GEMMA_4,
            "num_global_key_value_heads": 2,
            "enable_moe_block": True,
            "num_experts": 128,
            "top_k_experts": 8,
            "moe_intermediate_size": 704,
        },
        "glm-4.5-air": {
            "attention_bias": True,
            "first_k_dense_replace": 1,
            "n_routed_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1408,
        },
        "gpt-oss-20b": {"num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128},
        "gpt-oss-120b": {"num_local_experts": 128, "num_experts_per_tok": 4, "sliding_window": 128},
        "minimax-m2": {"num_local_experts": 256, "num_experts_per_tok": 8, "rotary_dim": 64},
        "minimax-m3": {
            "partial_rotary_factor": 0.5,
            "layer_types": [*["full_attention"] * 3, *["minimax_m3_sparse"] * 57],
            "mlp_layer_types": [*["dense"] * 3, *["sparse"] * 57],
        },
        "olmo-3-7b": {"sliding_window": 4096},
        "phi-4": _NO_WINDOW,
        "deepseek-v2-lite": {
            "q_lora_rank": None,
            "first_k_dense_replace": 1,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 1408,
        },
        "deepseek-v4-flash": {"moe_intermediate_size": 2048, "compress_ratios": [0, 0, *[4, 128] * 20, 4]},
        "falcon-h1-7b": {"mamba_d_ssm": 3072, "mamba_d_head": 128, "mamba_n_heads": 24},
        "nemotron-3-super": {
            "hybrid_override_pattern": "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*"
            "EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME",
            "mamba_num_heads": 128,
            "n_routed_experts": 512,
            "num_experts_per_tok": 22,
            "moe_latent_size": 1024,
            "moe_intermediate_size": 2688,
            "moe_shared_expert_intermediate_size": 5376,
        },
        "gemma-4-31b": {**_LARGE_GEMMA_4, "num_global_key_value_heads": 4},
    }
)


def catalogue_names() -> tuple[str, ...]:
    """Names of the models, in the order of their families."""
    return tuple(_ROWS)


def find_cost(name: str, *, weight_bits: int = 16, kv_bits: int = 16) -> ModelCost:
    """The cost of the model called `name`; upper and lower case are the same.

    Raises:
        ConfigurationError: there is no such model.
    """
    known = name.lower()
    if known not in _ROWS:
        raise ConfigurationError(f"no model is called {shown(name)}; choose one of {', '.join(_ROWS)}")
    config = {**dict(zip(_COLUMNS, _ROWS[known], strict=True)), **_MORE.get(known, {})}
    return read_cost(config, known, weight_bits=weight_bits, kv_bits=kv_bits)
