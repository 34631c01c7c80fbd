"""Self-attention of one layer: project, rotate and store K and V, attend over the KV cache, project back.

The K and V of a step are in the KV cache before the backend reads it. Nothing is kept between calls.
"""

from collections.abc import Callable
from typing import Any

import torch

from tandem.architecture.mixers import AttentionSpec
from tandem.compute.attention import AttentionBackend, AttentionParams, StateBackend
from tandem.compute.layer_states import LayerKV
from tandem.compute.ops import Kernels
from tandem.compute.step import AttentionBatch, Choices
from tandem.models.layers.norm import Norm
from tandem.models.layers.query_factors import query_factors
from tandem.models.layers.rotary import RotaryTable
from tandem.models.layers.sigmoid import rowwise_sigmoid
from tandem.models.parameters import Parameters

_RowFunction = Callable[[torch.Tensor], torch.Tensor]


class Attention:
    """`Mixer` that computes an `AttentionSpec` with the tensors that it names. `rotary`: tables of its rotary
    embedding.
    """

    def __init__(self, spec: AttentionSpec, parameters: Parameters, rotary: RotaryTable, kernels: Kernels) -> None:
        self._spec = spec
        self._kernels = kernels
        self._rotary = rotary
        self.params = AttentionParams(
            spec.num_heads,
            spec.scale,
            spec.window,
            spec.softcap,
            None if spec.sinks is None else parameters.tensors[spec.sinks.name].float(),
        )
        self._q = parameters.linear(spec.q)
        self._k = None if spec.k is None else parameters.linear(spec.k)
        self._v = None if spec.v is None else parameters.linear(spec.v)
        self._o = parameters.linear(spec.o)
        q_norm = Norm.take_optional(spec.q_norm, parameters, kernels)
        k_norm = Norm.take_optional(spec.k_norm, parameters, kernels)
        self._v_norm = Norm.take_optional(spec.v_norm, parameters, kernels)
        is_per_head = spec.q_norm is not None and spec.q_norm.size == spec.head_dim
        self._head_q_norm, self._head_k_norm = (q_norm, k_norm) if is_per_head else (None, None)
        wholes = (None, None) if is_per_head else (q_norm, k_norm)
        self._whole_q_norm, self._whole_k_norm = (_over_heads(norm, parameters) for norm in wholes)
        self._query_factors = query_factors(spec.query_scaling, rotary.cos)

    def write(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        kv: LayerKV,
        batch: AttentionBatch,
        backend: StateBackend[Any],
    ) -> torch.Tensor:
        """Writes K and V of `x` [num_tokens, hidden] into `kv`, if the layer has its own. Returns its queries
        [num_tokens, num_heads, head_dim], each followed by its gate if the layer has gates.
        """
        spec, norm = self._spec, self._head_q_norm
        found = _normed(self._q(x), self._whole_q_norm).view(-1, spec.num_heads, spec.q.outputs // spec.num_heads)
        queries, gates = found[..., : spec.head_dim].contiguous(), found[..., spec.head_dim :]
        weight = None if norm is None else norm.weight
        eps, unit_offset = (1e-6, False) if norm is None else (norm.spec.eps, norm.spec.unit_offset)
        cos, sin = self._rotary.cos, self._rotary.sin
        if self._k is None:
            self._kernels.rotate(queries, cos, sin, positions, norm=weight, norm_eps=eps, unit_offset=unit_offset)
        else:
            keys = _normed(self._k(x), self._whole_k_norm).view(-1, spec.num_kv_heads, spec.head_dim)
            self._kernels.rope_and_write(
                queries,
                keys,
                self._values(x, keys),
                cos,
                sin,
                positions,
                batch.slot_mapping,
                kv.keys,
                kv.values,
                q_norm=weight,
                k_norm=None if self._head_k_norm is None else self._head_k_norm.weight,
                norm_eps=eps,
                unit_offset=unit_offset,
            )
        if self._query_factors is not None:
            queries.mul_(self._query_factors[positions].to(queries.dtype))
        return torch.cat((queries, gates), dim=2) if spec.is_gated else queries

    def _values(self, x: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Values [num_tokens, num_kv_heads, head_dim], in separate memory since `keys` are rotated in place."""
        values = keys if self._v is None else self._v(x).view_as(keys)
        if self._v_norm is not None:
            return self._v_norm(values)
        return values.clone() if values is keys else values

    def attend(
        self, queries: torch.Tensor, kv: LayerKV, batch: AttentionBatch, backend: AttentionBackend, choices: Choices
    ) -> torch.Tensor:
        """Output [num_tokens, hidden] of attention of the queries over `kv`."""
        if not self._spec.is_gated:
            return self.output(backend.attend(queries, kv, batch, self.params))
        queries, gates = torch.split(queries, self._spec.head_dim, dim=2)
        found = backend.attend(queries.contiguous(), kv, batch, self.params)
        return self.output(found * rowwise_sigmoid(gates))

    def output(self, found: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden], projected from the outputs of the heads [num_tokens, num_heads, head_dim]."""
        return self._o(found.flatten(1))


def _over_heads(norm: Norm | None, parameters: Parameters) -> _RowFunction | None:
    """The norm, exchanging with the other ranks if this rank has only some of the heads that it covers."""
    if norm is None or norm.spec.within is None:
        return norm
    return parameters.over_ranks(norm, norm.spec.size, norm.spec.within)


def _normed(x: torch.Tensor, norm: _RowFunction | None) -> torch.Tensor:
    return x if norm is None else norm(x)
