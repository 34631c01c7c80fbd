"""Builders of tiny random checkpoints of families with recurrent states; see `tests.helpers.checkpoints`."""

from pathlib import Path
from typing import Any

import transformers

from tests.helpers.checkpoint_sizes import SIZES
from tests.helpers.checkpoints import Builder
from tests.helpers.delta_checkpoints import DELTA_BUILDERS
from tests.helpers.random_models import save

_UNTIED: dict[str, Any] = {"tie_word_embeddings": False}
_MAMBA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_d_head": 16,
    "mamba_chunk_size": 16,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "intermediate_size": 32,
    "shared_intermediate_size": 48,
    "attention_multiplier": 0.2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.6,
    "logits_scaling": 4.0,
}


_NEMOTRON: dict[str, Any] = {
    "layers_block_type": ["linear_attention", "moe", "linear_attention", "full_attention", "mlp"],
    "head_dim": 32,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "n_groups": 2,
    "chunk_size": 16,
    "n_routed_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 24,
    "routed_scaling_factor": 2.5,
    "time_step_min": 1e-30,  # NOTE: transformers applies another to a prompt and not to what follows
}


_FALCON: dict[str, Any] = {
    "head_dim": 32,
    "mamba_d_ssm": 96,
    "mamba_n_heads": 6,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_d_head": 16,
    "mamba_chunk_size": 16,
    "mamba_norm_before_gate": False,
    "embedding_multiplier": 5.65,
    "lm_head_multiplier": 0.39,
    "key_multiplier": 0.7,
    "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.9,
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.6,
    "ssm_multipliers": [0.9, 0.8, 0.7, 1.4, 0.6],
    "mlp_multipliers": [0.88, 0.58],
}


def save_tiny_lfm2(path: Path, *, seed: int = 0, dtype: str = "float32", **options: Any) -> Path:
    """An Lfm2ForCausalLM: two convolutions around a layer of attention, then another."""
    kinds = {"layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False}
    return save(path, transformers.Lfm2Config(**SIZES | _UNTIED | kinds | options), seed, dtype)


def save_tiny_lfm2_moe(path: Path, *, seed: int = 0, dtype: str = "float32", **options: Any) -> Path:
    """An Lfm2MoeForCausalLM: a dense layer, then experts; the last layer is one of attention."""
    kinds = {"layer_types": ["conv", "conv", "full_attention"], "num_dense_layers": 1, "num_experts": 6}
    experts = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
    return save(path, transformers.Lfm2MoeConfig(**SIZES | _UNTIED | kinds | experts | options), seed, dtype)


def save_tiny_granite_hybrid(path: Path, *, seed: int = 0, dtype: str = "float32", **options: Any) -> Path:
    """A GraniteMoeHybridForCausalLM: Mamba-2 around a layer of attention, experts beside a shared block."""
    return save(path, transformers.GraniteMoeHybridConfig(**SIZES | _MAMBA | options), seed, dtype)


def save_tiny_nemotron_h(path: Path, *, seed: int = 0, dtype: str = "float32", **options: Any) -> Path:
    """A NemotronHForCausalLM: Mamba-2 with experts and alone, then attention with a block for every token."""
    sizes = {name: size for name, size in SIZES.items() if name != "num_hidden_layers"}
    return save(path, transformers.NemotronHConfig(**sizes | _NEMOTRON | options), seed, dtype)


def save_tiny_nemotron_latent(path: Path, **options: Any) -> Path:
    """The same with experts behind a map to fewer elements, which has a bias, as all blocks have."""
    return save_tiny_nemotron_h(path, **{"moe_latent_size": 24, "mlp_bias": True} | options)


def save_tiny_falcon_h1(path: Path, *, seed: int = 0, dtype: str = "float32", **options: Any) -> Path:
    """A FalconH1ForCausalLM: Mamba-2 and attention side by side in each layer, and all multipliers."""
    return save(path, transformers.FalconH1Config(**SIZES | _FALCON | options), seed, dtype)


def save_tiny_mamba2(path: Path, *, seed: int = 0, dtype: str = "float32", **options: Any) -> Path:
    """A Mamba2ForCausalLM: recurrences alone."""
    kinds = {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "chunk_size": 16}
    return save(path, transformers.Mamba2Config(**SIZES | kinds | options), seed, dtype)


def save_tiny_jamba(path: Path, *, seed: int = 0, dtype: str = "float32", **options: Any) -> Path:
    """A JambaForCausalLM: Mamba around a layer of attention that has experts."""
    kinds = {"attn_layer_period": 3, "attn_layer_offset": 1, "mamba_d_state": 16, "mamba_dt_rank": 8}
    experts = {"num_experts": 5, "num_experts_per_tok": 2}
    return save(path, transformers.JambaConfig(**SIZES | kinds | experts | options), seed, dtype)


RECURRENT_BUILDERS: dict[str, Builder] = {
    "lfm2": save_tiny_lfm2,
    "lfm2_moe": save_tiny_lfm2_moe,
    "granite_hybrid": save_tiny_granite_hybrid,
    "jamba": save_tiny_jamba,
    "mamba2": save_tiny_mamba2,
    "nemotron_h": save_tiny_nemotron_h,
    "nemotron_latent": save_tiny_nemotron_latent,
    "falcon_h1": save_tiny_falcon_h1,
    **DELTA_BUILDERS,
}
"""Families with recurrent states."""
