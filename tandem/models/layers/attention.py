"""Self-attention of one layer: project, rotate and store, attend over the arena, project back.

The step's K and V are in the arena before the backend reads it. Nothing is kept between calls.
"""

from collections.abc import Mapping

import torch

from tandem.architecture.mixers import AttentionSpec
from tandem.attention.arena import LayerKV
from tandem.attention.base import AttentionBackend, AttentionBatch, AttentionParams
from tandem.kernels.base import Kernels
from tandem.models.layers.linear import Linear, Norm
from tandem.models.layers.rotary import RotaryTable


class Attention:
    """Computes an `AttentionSpec` with the tensors that it names. `rotary`: tables of its rotary embedding."""

    def __init__(
        self, spec: AttentionSpec, weights: Mapping[str, torch.Tensor], rotary: RotaryTable, kernels: Kernels
    ) -> None:
        self._spec = spec
        self._kernels = kernels
        self._rotary = rotary
        self._params = AttentionParams(spec.scale, spec.window, spec.softcap)
        self._q = Linear.take(spec.q, weights, kernels)
        self._k = Linear.take(spec.k, weights, kernels)
        self._v = Linear.take(spec.v, weights, kernels)
        self._o = Linear.take(spec.o, weights, kernels)
        self._q_norm = Norm.take_optional(spec.q_norm, weights, kernels)
        self._k_norm = Norm.take_optional(spec.k_norm, weights, kernels)

    def write(self, x: torch.Tensor, positions: torch.Tensor, kv: LayerKV, batch: AttentionBatch) -> torch.Tensor:
        """Queries [num_tokens, num_heads, head_dim] of `x` [num_tokens, hidden]; its K and V are in `kv` then."""
        spec, norm = self._spec, self._q_norm
        queries = self._q(x).view(-1, spec.num_heads, spec.head_dim)
        keys = self._k(x).view(-1, spec.num_kv_heads, spec.head_dim)
        values = self._v(x).view(-1, spec.num_kv_heads, spec.head_dim)
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
            q_norm=None if norm is None else norm.weight,
            k_norm=None if self._k_norm is None else self._k_norm.weight,
            norm_eps=1e-6 if norm is None else norm.spec.eps,
            unit_offset=norm is not None and norm.spec.unit_offset,
        )
        return queries

    def attend(
        self, queries: torch.Tensor, kv: LayerKV, batch: AttentionBatch, backend: AttentionBackend
    ) -> torch.Tensor:
        """[num_tokens, hidden], of what the queries find in `kv`."""
        return self._o(backend.attend(queries, kv, batch, self._params).flatten(1))
