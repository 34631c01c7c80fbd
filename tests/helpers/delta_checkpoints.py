"""Builders of tiny random checkpoints of families with the gated delta rule; see `tests.helpers.checkpoints`."""

from pathlib import Path
from typing import Any

import transformers

from tests.helpers.checkpoint_sizes import SIZES
from tests.helpers.checkpoints import Builder, read_tensors, write_tensors
from tests.helpers.random_models import save

_DELTA: dict[str, Any] = SIZES | {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
    "tie_word_embeddings": False,
}
_EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 48,
}
_KIMI: dict[str, Any] = SIZES | {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "num_experts": 8,
    "num_experts_per_token": 3,
    "num_expert_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 24,
    "tie_word_embeddings": False,
}
_SLOWER = 4.0  # NOTE: random decays are of a token or two, beside which an error in what is kept would not show


def save_tiny_qwen3_next(path: Path, *, seed: int = 0, dtype: str = "float32", **options: Any) -> Path:
    """A Qwen3NextForCausalLM whose middle layer has attention and no experts."""
    kinds = {"mlp_only_layers": [1]}
    return _slowed(save(path, transformers.Qwen3NextConfig(**_DELTA | _EXPERTS | kinds | options), seed, dtype))


def save_tiny_qwen3_5(path: Path, *, seed: int = 0, dtype: str = "float32", **options: Any) -> Path:
    """A Qwen3_5ForCausalLM."""
    return _slowed(save(path, transformers.Qwen3_5TextConfig(**_DELTA | options), seed, dtype))


def save_tiny_qwen3_5_moe(path: Path, *, seed: int = 0, dtype: str = "float32", **options: Any) -> Path:
    """A Qwen3_5MoeForCausalLM."""
    return _slowed(save(path, transformers.Qwen3_5MoeTextConfig(**_DELTA | _EXPERTS | options), seed, dtype))


def save_tiny_qwen3_5_conditional(path: Path, *, seed: int = 0, dtype: str = "float32", **options: Any) -> Path:
    """A Qwen3_5ForConditionalGeneration: the same text model beside a very small vision tower."""
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "num_position_embeddings": 16,
        "out_hidden_size": SIZES["hidden_size"],
        "patch_size": 8,
    }
    text = transformers.Qwen3_5TextConfig(**_DELTA | options)
    return _slowed(save(path, transformers.Qwen3_5Config(text_config=text, vision_config=vision), seed, dtype))


def save_tiny_kimi_linear(path: Path, *, seed: int = 0, dtype: str = "float32", **options: Any) -> Path:
    """A KimiLinearForCausalLM: a dense layer, then experts in groups and a shared one; latents in the middle layer."""
    return _slowed(save(path, transformers.KimiLinearConfig(**_KIMI | options), seed, dtype))


def _slowed(path: Path) -> Path:
    """The same with decays of tens of tokens."""
    tensors = read_tensors(path)
    for name, tensor in tensors.items():
        if name.endswith("A_log"):
            tensors[name] = tensor - _SLOWER
    return write_tensors(path, tensors)


DELTA_BUILDERS: dict[str, Builder] = {
    "qwen3_next": save_tiny_qwen3_next,
    "qwen3_5": save_tiny_qwen3_5,
    "qwen3_5_moe": save_tiny_qwen3_5_moe,
    "kimi_linear": save_tiny_kimi_linear,
}
"""Families with the gated delta rule."""
