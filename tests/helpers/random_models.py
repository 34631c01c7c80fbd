"""Random models of a configuration, made and saved by transformers."""

from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

_NOT_IN_AUTO = {"mistral4": transformers.Mistral4ForCausalLM}  # NOTE: in 5.23 only its wrapper is


def save(path: Path, config: PreTrainedConfig, seed: int, dtype: str) -> Path:
    """Write a random model of `config` to `path`."""
    torch.manual_seed(seed)
    oracle = oracle_class(config.model_type, hasattr(config, "text_config"))
    config._attn_implementation = "eager"
    model = oracle._from_config(config) if config.model_type in _NOT_IN_AUTO else oracle.from_config(config)
    _spread(model, getattr(config, "text_config", config).initializer_range)
    model.to(getattr(torch, dtype)).save_pretrained(path)
    return path


def oracle_class(model_type: str, multimodal: bool = False) -> Any:
    """The class of transformers that makes and loads such models."""
    if model_type in _NOT_IN_AUTO:
        return _NOT_IN_AUTO[model_type]
    return transformers.AutoModelForImageTextToText if multimodal else transformers.AutoModelForCausalLM


def choose_the_earliest(indexer: torch.nn.Module) -> None:
    """Makes an indexer of transformers choose the earliest of tokens with the same score."""
    plain = indexer.forward

    def topk(scores: torch.Tensor, k: int, dim: int = -1) -> Any:
        values, indices = scores.sort(dim=dim, descending=True, stable=True)
        return torch.return_types.topk((values.narrow(dim, 0, k), indices.narrow(dim, 0, k)))

    def forward(*args: Any, **options: Any) -> Any:
        with mock.patch.object(torch.Tensor, "topk", topk):
            return plain(*args, **options)

    indexer.forward = forward


def _spread(model: PreTrainedModel, width: float) -> None:
    """Norm weights, biases and scales start as constants: give them values that a mistake would show in."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 or name.endswith("position_bias"):
                parameter.add_(torch.randn_like(parameter) * (0.2 if "norm" in name else width))
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias", "layer_scalar")):
                buffer.add_(torch.randn_like(buffer) * width)
            if name.endswith("tid2eid"):
                num_experts = model.config.n_routed_experts
                buffer.copy_(torch.rand(len(buffer), num_experts).argsort(1)[:, : buffer.shape[1]])
