"""Builders of tiny random checkpoints, one function a family, saved by transformers exactly as it saves real ones.

Weights are spread widely (`initializer_range`), so that logits are far from flat and greedy tokens vary.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import PreTrainedConfig, PreTrainedModel

Builder = Callable[..., Path]

_SIZES: dict[str, Any] = {
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


def save_tiny_llama(path: Path, *, seed: int = 0, dtype: str = "float32", **options: Any) -> Path:
    """A LlamaForCausalLM of three layers at `path`; `options` override keys of its configuration."""
    return _save(path, transformers.LlamaConfig(**_SIZES | options), seed, dtype)


def save_tiny_mistral(path: Path, *, seed: int = 0, dtype: str = "float32", **options: Any) -> Path:
    """A MistralForCausalLM with a window shorter than a test's prompt."""
    return _save(path, transformers.MistralConfig(**_SIZES | {"sliding_window": 12} | options), seed, dtype)


def save_tiny_qwen2(path: Path, *, seed: int = 0, dtype: str = "float32", **options: Any) -> Path:
    """A Qwen2ForCausalLM; its biases are random too."""
    return _save(path, transformers.Qwen2Config(**_SIZES | options), seed, dtype)


def save_tiny_qwen3(path: Path, *, seed: int = 0, dtype: str = "float32", **options: Any) -> Path:
    """A Qwen3ForCausalLM whose head size is not hidden / heads."""
    return _save(path, transformers.Qwen3Config(**_SIZES | {"head_dim": 32} | options), seed, dtype)


def save_tiny_gemma3(path: Path, *, seed: int = 0, dtype: str = "float32", **options: Any) -> Path:
    """A Gemma3ForCausalLM of two local layers and a global one, window shorter than a test's prompt."""
    return _save(path, transformers.Gemma3TextConfig(**_GEMMA3 | options), seed, dtype)


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
    text = transformers.Gemma3TextConfig(**_GEMMA3 | options)
    tokens: dict[str, Any] = {
        "boi_token_index": 3,
        "eoi_token_index": 4,
        "image_token_index": 5,
        "mm_tokens_per_image": 4,
    }
    return _save(path, transformers.Gemma3Config(text_config=text, vision_config=vision, **tokens), seed, dtype)


_GEMMA3 = _SIZES | {
    "initializer_range": 0.06,  # NOTE: embeddings are scaled up and tied; wider, every token predicts itself
    "head_dim": 16,
    "sliding_window": 10,
    "query_pre_attn_scalar": 24,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}

BUILDERS: dict[str, Builder] = {
    "llama": save_tiny_llama,
    "mistral": save_tiny_mistral,
    "qwen2": save_tiny_qwen2,
    "qwen3": save_tiny_qwen3,
    "gemma3": save_tiny_gemma3,
}


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
    """The same checkpoint in transformers, with its plain attention."""
    auto = _auto_class("text_config" in json.loads((path / "config.json").read_text()))
    model: PreTrainedModel = auto.from_pretrained(path, dtype=dtype, attn_implementation="eager")
    return model


def _save(path: Path, config: PreTrainedConfig, seed: int, dtype: str) -> Path:
    torch.manual_seed(seed)
    model = _auto_class(hasattr(config, "text_config")).from_config(config, attn_implementation="eager")
    _spread(model, getattr(config, "text_config", config).initializer_range)
    model.to(getattr(torch, dtype)).save_pretrained(path)
    return path


def _auto_class(multimodal: bool) -> Any:
    return transformers.AutoModelForImageTextToText if multimodal else transformers.AutoModelForCausalLM


def _spread(model: PreTrainedModel, width: float) -> None:
    """Norm weights and biases start as constants: give them values that a mistake would show in."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * (0.2 if "norm" in name else width))


def _edit(path: Path, name: str, changes: dict[str, Any]) -> Path:
    file = path / name
    values = json.loads(file.read_text()) if file.exists() else {}
    values = {key: value for key, value in (values | changes).items() if value is not ...}
    file.write_text(json.dumps(values))
    return path
