"""Multi-head latent attention of one layer: project, rotate and store one row per token, attend over the rows.

Keys and values are never made: each head's map to keys is applied to its query, that to values to its sum of latents.
So a token costs the same whether it is of a prompt or generated, and its bits do not depend on how a prompt is divided.
"""

import torch

from tandem.architecture.mixers import LatentAttentionSpec
from tandem.compute.attention import AttentionParams, LatentBackend
from tandem.compute.layer_states import LayerLatents
from tandem.compute.ops import Kernels
from tandem.compute.step import AttentionBatch, Choices
from tandem.compute.weights.base import Linear
from tandem.compute.weights.by_head import LinearByHead
from tandem.compute.weights.row_rounding import rows_as_multiplied
from tandem.models.layers.norm import Norm
from tandem.models.layers.query_factors import query_factors
from tandem.models.layers.rotary import RotaryTable
from tandem.models.parameters import Parameters


class LatentAttention:
    """`Mixer` that computes a `LatentAttentionSpec` with the tensors that it names. `rotary`: tables of its rotary
    embedding.
    """

    def __init__(
        self, spec: LatentAttentionSpec, parameters: Parameters, rotary: RotaryTable, kernels: Kernels
    ) -> None:
        self._spec = spec
        self._kernels = kernels
        self._rotary = rotary
        self.params = AttentionParams(spec.num_heads, spec.scale)
        self._q_a = None if spec.q_a is None else parameters.linear(spec.q_a)
        self._q_norm = Norm.take_optional(spec.q_norm, parameters, kernels)
        self._q = parameters.linear(spec.q)
        self._kv_a = parameters.linear(spec.kv_a)
        self._kv_norm = Norm.take(spec.kv_norm, parameters, kernels)
        kv_b = parameters.linear(spec.kv_b)
        self._kv_b = kv_b.weight
        key_map, value_map = _split(kv_b, spec, self._kv_norm.weight)
        self._key_map, self._value_map = LinearByHead(key_map, kernels), LinearByHead(value_map, kernels)
        self._o = parameters.linear(spec.o)
        self._query_factors = query_factors(spec.query_scaling, rotary.cos)

    def write(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        latents: LayerLatents,
        batch: AttentionBatch,
        backend: LatentBackend,
    ) -> torch.Tensor:
        """Writes the rows of `x` [num_tokens, hidden] into `latents`. Returns its queries [num_tokens, num_heads,
        plain_dim + rotary_dim], whose last elements are rotated.
        """
        self.write_rows(x, positions, latents, batch)
        return self.queries(self.query_input(x), positions)

    def attend(
        self,
        queries: torch.Tensor,
        latents: LayerLatents,
        batch: AttentionBatch,
        backend: LatentBackend,
        choices: Choices,
    ) -> torch.Tensor:
        """Output [num_tokens, hidden] of attention of the queries over `latents`."""
        return self.output(backend.attend(self.mapped(queries), latents, batch, self.params))

    def write_rows(
        self, x: torch.Tensor, positions: torch.Tensor, latents: LayerLatents, batch: AttentionBatch
    ) -> None:
        """Stores the rows of `x` [num_tokens, hidden]."""
        latent, key = self._kv_a(x).tensor_split([self._spec.rank], dim=1)
        rotated = self._rotated(key.unsqueeze(1), positions).squeeze(1)
        latent = rows_as_multiplied(self._kv_b, self._kv_norm(latent))
        latents.write(torch.cat((latent, rotated), dim=1), batch.slot_mapping)

    def query_input(self, x: torch.Tensor) -> torch.Tensor:
        """Input of the map to queries: a normed latent, or `x` itself."""
        if self._q_a is None:
            return x
        latent = self._q_a(x)
        return latent if self._q_norm is None else self._q_norm(latent)

    def queries(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Queries [num_tokens, num_heads, plain_dim + rotary_dim] of the result of `query_input`."""
        spec = self._spec
        queries = self._q(x).view(-1, spec.num_heads, spec.plain_dim + spec.rotary_dim)
        queries[..., spec.plain_dim :] = self._rotated(queries[..., spec.plain_dim :], positions)
        if self._query_factors is not None:
            queries.mul_(self._query_factors[positions].to(queries.dtype))
        return queries

    def mapped(self, queries: torch.Tensor) -> torch.Tensor:
        """Queries mapped into the space of latent rows, [num_tokens, num_heads, rank + rotary_dim]."""
        plain, rotated = queries.tensor_split([self._spec.plain_dim], dim=2)
        return torch.cat((self._key_map(plain), rotated), dim=2)

    def output(self, sums: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden], projected from sums of latents [num_tokens, num_heads, rank]."""
        return self._o(self._value_map(sums).flatten(1))

    def _rotated(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """`x` [num_tokens, heads, rotary_dim], rotated and half-split, in new memory."""
        return rotated_half_split(x, positions, self._rotary, self._kernels, is_interleaved=self._spec.is_interleaved)


def rotated_half_split(
    x: torch.Tensor, positions: torch.Tensor, rotary: RotaryTable, kernels: Kernels, *, is_interleaved: bool
) -> torch.Tensor:
    """`x` [num_tokens, heads, rotary_dim], rotated and half-split, in new memory."""
    if is_interleaved:
        x = torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)
    else:
        x = x.contiguous() if not x.is_contiguous() else x.clone()
    kernels.rotate(x, rotary.cos, rotary.sin, positions)
    return x


def _split(kv_b: Linear, spec: LatentAttentionSpec, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The maps of latents to keys and to values, transposed for a query and for a sum of latents.

    `like`: a tensor with the rows' dtype and device.

    Returns:
        [num_heads, rank, plain_dim] and [num_heads, value_dim, rank].

    NOTE: a weight in any format is asked for its numbers by multiplying unit vectors, which is exact but for a rounding
    in float32 where rows are rounded to 8 bits.
    """
    units = torch.eye(spec.rank, dtype=like.dtype, device=like.device)
    by_head = kv_b(units).view(spec.rank, spec.num_heads, spec.plain_dim + spec.value_dim)
    keys, values = by_head.tensor_split([spec.plain_dim], dim=2)
    return keys.transpose(0, 1).contiguous(), values.permute(1, 2, 0).contiguous()
