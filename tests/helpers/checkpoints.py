"""Builders of tiny random checkpoints, one function a family, saved by transformers exactly as it saves real ones.

Weights are spread widely (`initializer_range`), so that logits are far from flat and greedy tokens vary.
"""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from tests.helpers.checkpoint_sizes import (
    DEEPSEEK_V4,
    GEMMA2,
    GEMMA3,
    GEMMA4,
    INDEXED,
    LATENT,
    MINISTRAL3,
    MISTRAL4,
    SIZES,
)
from tests.helpers.random_models import choose_the_earliest, oracle_class, save

Builder = Callable[..., Path]

_MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.6,
    "attention_multiplier": 0.2,
    "logits_scaling": 4.0,
}


def save_tiny_llama(path: Path, *, seed: int = 0, dtype: str = "float32", **options: Any) -> Path:
    """A LlamaForCausalLM of three layers at `path`; `options` override keys of its configuration."""
    return save(path, transformers.LlamaConfig(**SIZES | options), seed, dtype)


def save_tiny_mistral(path: Path, *, seed: int = 0, dtype: str = "float32", **options: Any) -> Path:
    """A MistralForCausalLM with a window shorter than a test's prompt."""
    return save(path, transformers.MistralConfig(**SIZES | {"sliding_window": 12} | options), seed, dtype)


def save_tiny_qwen2(path: Path, *, seed: int = 0, dtype: str = "float32", **options: Any) -> Path:
    """A Qwen2ForCausalLM; its biases are random too."""
    return save(path, transformers.Qwen2Config(**SIZES | options), seed, dtype)


def save_tiny_qwen3(path: Path, *, seed: int = 0, dtype: str = "float32", **options: Any) -> Path:
    """A Qwen3ForCausalLM whose head size is not hidden / heads."""
    return save(path, transformers.Qwen3Config(**SIZES | {"head_dim": 32} | options), seed, dtype)


def save_tiny_mixtral(path: Path, *, seed: int = 0, dtype: str = "float32", **options: Any) -> Path:
    """A MixtralForCausalLM of eight experts, two for each token."""
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 64}
    return save(path, transformers.MixtralConfig(**SIZES | experts | options), seed, dtype)


def save_tiny_qwen3_moe(path: Path, *, seed: int = 0, dtype: str = "float32", **options: Any) -> Path:
    """A Qwen3MoeForCausalLM whose middle layer has no experts."""
    experts = {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
        "head_dim": 32,
    }
    return save(path, transformers.Qwen3MoeConfig(**SIZES | experts | options), seed, dtype)


def save_tiny_qwen2_moe(path: Path, *, seed: int = 0, dtype: str = "float32", **options: Any) -> Path:
    """A Qwen2MoeForCausalLM with a shared block beside its experts."""
    experts = {
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 48,
    }
    return save(path, transformers.Qwen2MoeConfig(**SIZES | experts | options), seed, dtype)


def save_tiny_glm4_moe(path: Path, *, seed: int = 0, dtype: str = "float32", **options: Any) -> Path:
    """A Glm4MoeForCausalLM: a dense layer, then experts in groups and a shared block."""
    experts = {
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 24,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
        "attention_bias": True,
        "head_dim": 32,
    }
    return save(path, transformers.Glm4MoeConfig(**SIZES | experts | options), seed, dtype)


def save_tiny_deepseek_v2(path: Path, *, seed: int = 0, dtype: str = "float32", **options: Any) -> Path:
    """A DeepseekV2ForCausalLM without latents of queries, as V2-Lite: experts are chosen among all."""
    return save(path, transformers.DeepseekV2Config(**LATENT | {"q_lora_rank": None} | options), seed, dtype)


def save_tiny_deepseek_v3(path: Path, *, seed: int = 0, dtype: str = "float32", **options: Any) -> Path:
    """A DeepseekV3ForCausalLM with YaRN's factor of the scores: a dense layer, then experts in groups and shared."""
    groups = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
    return save(path, transformers.DeepseekV3Config(**LATENT | groups | options), seed, dtype)


def save_tiny_deepseek_v32(path: Path, *, seed: int = 0, dtype: str = "float32", **options: Any) -> Path:
    """A DeepseekV32ForCausalLM whose queries attend to nine tokens that they choose."""
    groups = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
    return save(path, transformers.DeepseekV32Config(**LATENT | INDEXED | groups | options), seed, dtype)


def save_tiny_deepseek_v4(path: Path, *, seed: int = 0, dtype: str = "float32", **options: Any) -> Path:
    """A DeepseekV4ForCausalLM of all kinds of layers, whose first two choose experts by the token."""
    return save(path, transformers.DeepseekV4Config(**DEEPSEEK_V4 | options), seed, dtype)


def save_tiny_glm_moe_dsa(path: Path, *, seed: int = 0, dtype: str = "float32", **options: Any) -> Path:
    """A GlmMoeDsaForCausalLM whose last layer attends to what the one before chose."""
    others = {"n_shared_experts": 1, "indexer_types": ["full", "full", "shared"], "rope_parameters": None}
    return save(path, transformers.GlmMoeDsaConfig(**LATENT | INDEXED | others | options), seed, dtype)


def save_tiny_glm4_moe_lite(path: Path, *, seed: int = 0, dtype: str = "float32", **options: Any) -> Path:
    """A Glm4MoeLiteForCausalLM whose middle layer is the dense one and whose rotated elements are half-split."""
    kinds = {"mlp_layer_types": ["sparse", "dense", "sparse"], "first_k_dense_replace": 0}
    others = kinds | {"rope_interleave": False, "rope_parameters": None}
    return save(path, transformers.Glm4MoeLiteConfig(**LATENT | others | options), seed, dtype)


def save_tiny_mistral4(path: Path, *, seed: int = 0, dtype: str = "float32", **options: Any) -> Path:
    """A Mistral4ForCausalLM whose queries grow from position 16 on; its experts are stored as stacks."""
    return save(path, transformers.Mistral4Config(**MISTRAL4 | options), seed, dtype)


def save_tiny_minimax_m2(path: Path, *, seed: int = 0, dtype: str = "float32", **options: Any) -> Path:
    """A MiniMaxM2ForCausalLM of seven experts that rotates half of each head."""
    experts = {
        "num_local_experts": 7,
        "num_experts_per_tok": 3,
        "intermediate_size": 24,
        "head_dim": 32,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
    }
    return save(path, transformers.MiniMaxM2Config(**SIZES | experts | options), seed, dtype)


def save_tiny_gpt_oss(path: Path, *, seed: int = 0, dtype: str = "float32", **options: Any) -> Path:
    """A GptOssForCausalLM: sinks, a window shorter than a test's prompt, and clamps that are met."""
    experts = {
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "sliding_window": 10,
        "head_dim": 32,
        "swiglu_limit": 1.5,
    }
    return save(path, transformers.GptOssConfig(**SIZES | experts | options), seed, dtype)


def save_tiny_olmo2(path: Path, *, seed: int = 0, dtype: str = "float32", **options: Any) -> Path:
    """An Olmo2ForCausalLM."""
    return save(path, transformers.Olmo2Config(**SIZES | options), seed, dtype)


def save_tiny_olmo3(path: Path, *, seed: int = 0, dtype: str = "float32", **options: Any) -> Path:
    """An Olmo3ForCausalLM of two local layers and a global one, window shorter than a test's prompt."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    return save(
        path, transformers.Olmo3Config(**SIZES | {"sliding_window": 10, "layer_types": kinds} | options), seed, dtype
    )


def save_tiny_phi3(path: Path, *, seed: int = 0, dtype: str = "float32", **options: Any) -> Path:
    """A Phi3ForCausalLM, its tensors fused."""
    return save(
        path, transformers.Phi3Config(**SIZES | {"original_max_position_embeddings": 256} | options), seed, dtype
    )


def save_tiny_smollm3(path: Path, *, seed: int = 0, dtype: str = "float32", **options: Any) -> Path:
    """A SmolLM3ForCausalLM whose second layer knows no positions."""
    sizes = SIZES | {"no_rope_layer_interval": 2, "tie_word_embeddings": False}
    return save(path, transformers.SmolLM3Config(**sizes | options), seed, dtype)


def save_tiny_granite(path: Path, *, seed: int = 0, dtype: str = "float32", **options: Any) -> Path:
    """A GraniteForCausalLM with all four multipliers."""
    return save(path, transformers.GraniteConfig(**SIZES | _MULTIPLIERS | options), seed, dtype)


def save_tiny_granite_moe(path: Path, *, seed: int = 0, dtype: str = "float32", **options: Any) -> Path:
    """A GraniteMoeForCausalLM of five experts, two for each token."""
    experts = {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 32}
    return save(path, transformers.GraniteMoeConfig(**SIZES | _MULTIPLIERS | experts | options), seed, dtype)


def save_tiny_ministral3(path: Path, *, seed: int = 0, dtype: str = "float32", **options: Any) -> Path:
    """A Ministral3ForCausalLM whose queries grow from position 16 on."""
    return save(path, transformers.Ministral3Config(**MINISTRAL3 | options), seed, dtype)


def save_tiny_mistral3_conditional(
    path: Path, *, seed: int = 0, dtype: str = "float32", tied: bool = False, text: str = "ministral3", **options: Any
) -> Path:
    """A Mistral3ForConditionalGeneration: the text model of Ministral 3, of Mistral or of Mistral 4, beside a very
    small vision tower.
    """
    vision = {
        "model_type": "pixtral",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 8,
        "image_size": 16,
        "patch_size": 8,
    }
    texts: dict[str, Callable[[], transformers.PreTrainedConfig]] = {
        "ministral3": lambda: transformers.Ministral3Config(**MINISTRAL3 | options),
        "mistral": lambda: transformers.MistralConfig(**SIZES | {"sliding_window": None, "head_dim": 32} | options),
        "mistral4": lambda: transformers.Mistral4Config(**MISTRAL4 | options),
    }
    config = transformers.Mistral3Config(
        text_config=texts[text](), vision_config=vision, image_token_index=5, tie_word_embeddings=tied
    )
    return save(path, config, seed, dtype)


def save_tiny_gemma2(path: Path, *, seed: int = 0, dtype: str = "float32", **options: Any) -> Path:
    """A Gemma2ForCausalLM of two local layers around a global one, whose scores and logits come near their bounds."""
    return save(path, transformers.Gemma2Config(**GEMMA2 | options), seed, dtype)


def save_tiny_gemma3(path: Path, *, seed: int = 0, dtype: str = "float32", **options: Any) -> Path:
    """A Gemma3ForCausalLM of two local layers and a global one, window shorter than a test's prompt."""
    return save(path, transformers.Gemma3TextConfig(**GEMMA3 | options), seed, dtype)


def save_tiny_gemma3_conditional(path: Path, *, seed: int = 0, dtype: str = "float32", **options: Any) -> Path:
    """A Gemma3ForConditionalGeneration: the same text model beside a very small vision tower."""
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 8,
    }
    text = transformers.Gemma3TextConfig(**GEMMA3 | options)
    tokens: dict[str, Any] = {
        "boi_token_index": 3,
        "eoi_token_index": 4,
        "image_token_index": 5,
        "mm_tokens_per_image": 4,
    }
    return save(path, transformers.Gemma3Config(text_config=text, vision_config=vision, **tokens), seed, dtype)


def save_tiny_gemma4(path: Path, *, seed: int = 0, dtype: str = "float32", **options: Any) -> Path:
    """A Gemma4ForCausalLM whose last two of five layers read the K and V of others, with per-layer embeddings."""
    return save(path, _gemma4_text(options), seed, dtype)


def save_tiny_gemma4_moe(path: Path, *, seed: int = 0, dtype: str = "float32", **options: Any) -> Path:
    """A Gemma4ForCausalLM of five experts, two for each token, beside each gated block."""
    experts = {
        "enable_moe_block": True,
        "num_experts": 5,
        "top_k_experts": 2,
        "moe_intermediate_size": 24,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
    }
    return save(path, _gemma4_text(experts | options), seed, dtype)


def save_tiny_gemma4_conditional(path: Path, *, seed: int = 0, dtype: str = "float32", **options: Any) -> Path:
    """A Gemma4ForConditionalGeneration: the same text model beside a very small vision tower."""
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "patch_size": 4,
        "position_embedding_size": 16,
    }
    config = transformers.Gemma4Config(text_config=_gemma4_text(options), vision_config=vision, audio_config=None)
    return save(path, config, seed, dtype)


def _gemma4_text(options: dict[str, Any]) -> transformers.Gemma4TextConfig:
    sizes = GEMMA4 | options
    return transformers.Gemma4TextConfig(vocab_size_per_layer_input=sizes["vocab_size"], **sizes)


BUILDERS: dict[str, Builder] = {
    "llama": save_tiny_llama,
    "mistral": save_tiny_mistral,
    "qwen2": save_tiny_qwen2,
    "qwen3": save_tiny_qwen3,
    "gemma3": save_tiny_gemma3,
    "gemma4": save_tiny_gemma4,
    "mixtral": save_tiny_mixtral,
    "qwen3_moe": save_tiny_qwen3_moe,
    "deepseek_v3": save_tiny_deepseek_v3,
}
"""Families that every property is tested of."""

EXPERT_BUILDERS: dict[str, Builder] = {
    "gemma4_moe": save_tiny_gemma4_moe,
    "qwen2_moe": save_tiny_qwen2_moe,
    "deepseek_v2": save_tiny_deepseek_v2,
    "deepseek_v32": save_tiny_deepseek_v32,
    "deepseek_v4": save_tiny_deepseek_v4,
    "glm4_moe": save_tiny_glm4_moe,
    "glm_moe_dsa": save_tiny_glm_moe_dsa,
    "glm4_moe_lite": save_tiny_glm4_moe_lite,
    "mistral4": save_tiny_mistral4,
    "minimax_m2": save_tiny_minimax_m2,
    "gpt_oss": save_tiny_gpt_oss,
    "granite_moe": save_tiny_granite_moe,
}
"""More families with experts: parity with transformers, and equal tokens however they are computed."""

MORE_BUILDERS: dict[str, Builder] = {
    "olmo2": save_tiny_olmo2,
    "olmo3": save_tiny_olmo3,
    "phi3": save_tiny_phi3,
    "smollm3": save_tiny_smollm3,
    "granite": save_tiny_granite,
    "gemma2": save_tiny_gemma2,
    "ministral3": save_tiny_ministral3,
}
"""Families whose parts are tested with the others: beyond parity with transformers, their tests are slow."""

REPRESENTATIVES = ("llama", "gemma3", "gemma4", "qwen3_moe", "gpt_oss", "deepseek_v3", "deepseek_v32", "granite_hybrid")
"""One family of each kind: plain, windows, shared keys and values, experts, sinks, latents, chosen latents, recurrent
states.
"""


def family_params(families: Iterable[str]) -> list[Any]:
    """Parameters of a test of every family, which is slow for those that are like another."""
    return [pytest.param(name, marks=() if name in REPRESENTATIVES else pytest.mark.slow) for name in sorted(families)]


def edit_config(path: Path, **changes: Any) -> Path:
    """Rewrite keys of the `config.json` in `path`; `...` removes a key."""
    return _edit(path, "config.json", changes)


def edit_generation_config(path: Path, **changes: Any) -> Path:
    """As `edit_config`, for `generation_config.json`."""
    return _edit(path, "generation_config.json", changes)


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint in one safetensors file."""
    return load_file(path / "model.safetensors")


def write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """Replaces them."""
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def load_reference(path: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The same checkpoint in transformers, with its plain attention. Indexers choose the earliest of equal scores,
    which transformers leaves to chance.
    """
    config = json.loads((path / "config.json").read_text())
    oracle = oracle_class(config["model_type"], "text_config" in config)
    model: PreTrainedModel = oracle.from_pretrained(path, dtype=dtype, attn_implementation="eager")
    for name, module in model.named_modules():
        if name.endswith(".indexer"):
            choose_the_earliest(module)
    return model


def _edit(path: Path, name: str, changes: dict[str, Any]) -> Path:
    file = path / name
    values = json.loads(file.read_text()) if file.exists() else {}
    values = {key: value for key, value in (values | changes).items() if value is not ...}
    file.write_text(json.dumps(values))
    return path
