"""Attention layers of DeepSeek-V4 with random weights: those of transformers, and the specs and tensors of ours."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Attention, DeepseekV4RotaryEmbedding

from tandem.architecture.entry_mixers import SharedRowAttentionSpec
from tandem.architecture.families import base
from tandem.architecture.families.compressed_mixers import read_mixers
from tandem.architecture.fields import Fields
from tests.helpers.random_models import choose_the_earliest

KINDS = ("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention")
WINDOW, SPANS, TOP_K = 12, (4, 16), 3
_SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "q_lora_rank": 24,
    "moe_intermediate_size": 16,
    "partial_rotary_factor": 0.25,
    "o_groups": 4,
    "o_lora_rank": 16,
    "index_n_heads": 4,
    "index_head_dim": 16,
    "index_topk": TOP_K,
    "sliding_window": WINDOW,
    "layer_types": list(KINDS),
    "compress_rates": dict(zip(KINDS[1:], SPANS, strict=True)),
    "max_position_embeddings": 512,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 32,
        "beta_slow": 1,
    },
}
_DEFAULTS = base.Defaults(max_positions=512)


@dataclass
class OracleLayer:
    """A layer of transformers, and ours with the same weights."""

    config: DeepseekV4Config
    module: DeepseekV4Attention
    spec: SharedRowAttentionSpec
    tensors: dict[str, torch.Tensor]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Output of the layer of transformers for all of `x` [num_tokens, hidden]."""
        positions = torch.arange(len(x))[None]
        rotary = DeepseekV4RotaryEmbedding(self.config)
        angles = {name: rotary(x, positions, layer_type=name) for name in ("main", "compress")}
        distance = positions[0][:, None] - positions[0]
        is_seen = (distance >= 0) & (distance < self.config.sliding_window)
        mask = torch.zeros(is_seen.shape).masked_fill(~is_seen, -torch.inf)[None, None]
        with torch.no_grad():
            found: torch.Tensor = self.module(x[None], angles, positions, mask)[0]
        return found[0]


def oracle_layer(kind: str, seed: int = 0, **options: Any) -> OracleLayer:
    """A layer of `kind` with random weights."""
    torch.manual_seed(seed)
    index = KINDS.index(kind)
    config = DeepseekV4Config(**_SIZES | options)
    config._attn_implementation = "eager"
    module = DeepseekV4Attention(config, index).eval()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            spread = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 and "bias" not in name else 0.5
            parameter.normal_(1.0 if "norm" in name else 0.0, spread)
    indexer = getattr(module.compressor, "indexer", None)
    if indexer is not None:
        choose_the_earliest(indexer)
    fields = Fields(config.to_dict(), "config.json").renamed({"moe_intermediate_size": "intermediate_size"})
    spec = read_mixers(fields, base.read_sizes(fields, _DEFAULTS))[index]
    stored = {f"model.layers.{index}.self_attn.{name}": tensor for name, tensor in module.state_dict().items()}
    return OracleLayer(config, module, spec, {each.name: _taken(each, stored) for each in spec.tensors()})


def _taken(tensor: Any, stored: dict[str, torch.Tensor]) -> torch.Tensor:
    if tensor.source is None:
        return stored[tensor.name]
    return stored[tensor.source.tensor][tensor.source.start : tensor.source.stop]
