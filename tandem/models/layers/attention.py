"""Self-attention of one layer: project, rotate and store, attend over the arena, project back.

The step's K and V are in the arena before the backend reads it. Nothing is kept between calls.
"""

from collections.abc import Mapping

import torch

from tandem.attention.arena import LayerKV
from tandem.attention.base import AttentionBackend, AttentionBatch, AttentionParams
from tandem.kernels.base import Kernels
from tandem.models.config import LayerConfig, ModelConfig
from tandem.models.layers.linear import Linear
from tandem.models.layers.rotary import RotaryTable


class Attention:
    """Args:
    config: the whole model's.
    layer: what is particular to this layer.
    weights: every tensor of the model by Hugging Face name.
    prefix: this layer's, e.g. `model.layers.3.self_attn`.
    rotary: the tables of this layer's rotary embedding.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: LayerConfig,
        weights: Mapping[str, torch.Tensor],
        prefix: str,
        rotary: RotaryTable,
        kernels: Kernels,
    ) -> None:
        self._config = config
        self._kernels = kernels
        self._rotary = rotary
        self._params = AttentionParams(config.attention_scale, layer.window, config.attention_softcap)
        self._q = Linear.take(weights, f"{prefix}.q_proj")
        self._k = Linear.take(weights, f"{prefix}.k_proj")
        self._v = Linear.take(weights, f"{prefix}.v_proj")
        self._o = Linear.take(weights, f"{prefix}.o_proj")
        self._q_norm = weights.get(f"{prefix}.q_norm.weight")
        self._k_norm = weights.get(f"{prefix}.k_norm.weight")

    def write(self, x: torch.Tensor, positions: torch.Tensor, kv: LayerKV, batch: AttentionBatch) -> torch.Tensor:
        """Queries [num_tokens, num_heads, head_dim] of `x` [num_tokens, hidden]; its K and V are in `kv` then."""
        queries, keys, values = self._project(x)
        self._kernels.rope_and_write(
            queries,
            keys,
            values,
            self._rotary.cos,
            self._rotary.sin,
            positions,
            batch.slot_mapping,
            kv.keys,
            kv.values,
            q_norm=self._q_norm,
            k_norm=self._k_norm,
            norm_eps=self._config.rms_norm_eps,
            unit_offset=self._config.unit_offset_norm,
        )
        return queries

    def attend(
        self, queries: torch.Tensor, kv: LayerKV, batch: AttentionBatch, backend: AttentionBackend
    ) -> torch.Tensor:
        """[num_tokens, hidden], of what the queries find in `kv`."""
        attended = backend.attend(queries, kv, batch, self._params)
        return self._kernels.linear(attended.flatten(1), self._o.weight, self._o.bias)

    def _project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q [num_tokens, num_heads, head_dim], k and v [num_tokens, num_kv_heads, head_dim]."""
        linear, heads, head_dim = self._kernels.linear, self._config.num_kv_heads, self._config.head_dim
        queries = linear(x, self._q.weight, self._q.bias).view(-1, self._config.num_heads, head_dim)
        keys = linear(x, self._k.weight, self._k.bias).view(-1, heads, head_dim)
        values = linear(x, self._v.weight, self._v.bias).view(-1, heads, head_dim)
        return queries, keys, values
