"""Random checkpoints of real shapes, made once in a cache directory: speed does not depend on what the weights say."""

import os
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers

DEMO = Path(__file__).parent.parent / "demo" / "tandem-demo"

SHAPES: dict[str, dict[str, int]] = {
    "qwen3-0.6b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
    },
    "qwen3-8-layers": {  # Qwen3-0.6B's layers, eight of them, and a smaller vocabulary
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 16384,
    },
    "small": {
        "hidden_size": 768,
        "intermediate_size": 2304,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 16384,
    },
}


EXPERT_SHAPES: dict[str, dict[str, int]] = {
    "experts-1.2b": {  # the proportions of Qwen3-30B-A3B at half its width and a sixth of its depth
        "hidden_size": 1024,
        "moe_intermediate_size": 384,
        "intermediate_size": 3072,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "vocab_size": 32768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
    },
}

HYBRID_SHAPES: dict[str, dict[str, Any]] = {
    "hybrid-124m": {  # Granite 4 without experts: eleven layers of Mamba-2 around one of attention
        "hidden_size": 768,
        "shared_intermediate_size": 2048,
        "num_hidden_layers": 12,
        "layer_types": ["linear_attention"] * 5 + ["full_attention"] + ["linear_attention"] * 6,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "mamba_n_heads": 48,
        "mamba_d_head": 32,
        "mamba_d_state": 128,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "position_embedding_type": "nope",
        "vocab_size": 32000,
    },
}


def random_checkpoint(shape: str) -> Path:
    """A bfloat16 checkpoint of Qwen3, of `EXPERT_SHAPES` Qwen3-MoE or of `HYBRID_SHAPES` Granite 4, with the demo's
    tokenizer; made once.
    """
    cache = Path(os.environ.get("TANDEM_CACHE_DIR", Path.home() / ".cache" / "tandem"))
    path = cache / "bench" / shape
    if not (path / "complete").exists():
        shutil.rmtree(path, ignore_errors=True)
        _make(shape, path)
        (path / "complete").touch()
    return path


def _make(shape: str, path: Path) -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {
        **(SHAPES | EXPERT_SHAPES | HYBRID_SHAPES)[shape],
        "tie_word_embeddings": True,
        "max_position_embeddings": 40960,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "bos_token_id": None,
        "eos_token_id": 0,
    }
    torch.set_default_dtype(torch.bfloat16)
    try:
        if shape in SHAPES:
            model: Any = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**options))
        elif shape in HYBRID_SHAPES:
            config: Any = transformers.GraniteMoeHybridConfig(mamba_n_groups=1, **options)
            model = transformers.GraniteMoeHybridForCausalLM(config)
        else:
            config = transformers.Qwen3MoeConfig(norm_topk_prob=True, **options)
            model = transformers.Qwen3MoeForCausalLM(config)
    finally:
        torch.set_default_dtype(torch.float32)
    model.save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, path / name)
