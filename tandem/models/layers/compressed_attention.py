"""Native Sparse Attention of one layer: attention to compressed keys, to blocks chosen by these, and to a window."""

from dataclasses import replace

import torch

from tandem.architecture.block_mixers import (
    COMPRESSED_KEYS,
    COMPRESSED_VALUES,
    CompressedAttentionSpec,
    CompressorSpec,
)
from tandem.compute.block_scores import attend_to_compressed, closed_spans, last_rows, write_summary
from tandem.compute.block_sparse import ChosenKVBackend
from tandem.compute.layer_states import LayerChosenKV
from tandem.compute.ops import Kernels
from tandem.compute.sparse import QueryBatch
from tandem.compute.step import Choices
from tandem.models.layers.attention import Attention
from tandem.models.layers.rotary import RotaryTable
from tandem.models.layers.sigmoid import rowwise_sigmoid
from tandem.models.parameters import Parameters


class CompressedAttention:
    """`Mixer` that computes a `CompressedAttentionSpec` with the tensors that it names. `rotary`: tables of its rotary
    embedding.
    """

    def __init__(
        self, spec: CompressedAttentionSpec, parameters: Parameters, rotary: RotaryTable, kernels: Kernels
    ) -> None:
        self._spec = spec
        self._attention = Attention(spec.attention, parameters, rotary, kernels)
        self._gates = parameters.linear(spec.gates)
        self._compressors = {
            COMPRESSED_KEYS: Compressor(spec.keys, parameters),
            COMPRESSED_VALUES: Compressor(spec.values, parameters),
        }
        self.params = self._attention.params
        self.name = spec.attention.q.name
        self._near = replace(self.params, window=spec.window)

    def write(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        kv: LayerChosenKV,
        batch: QueryBatch,
        backend: ChosenKVBackend,
    ) -> tuple[torch.Tensor, ...]:
        """Writes K and V of `x` [num_tokens, hidden] into `kv`, and the compressed rows that they complete. Returns the
        queries [num_tokens, num_heads, head_dim], and the logits of the gates [num_tokens, 3 * num_heads].
        """
        queries = self._attention.write(x, positions, kv, batch, backend)
        requests, ends = closed_spans(batch, kv.span, self._spec.length)
        if len(ends):
            for (name, compressor), cache in zip(self._compressors.items(), (kv.keys, kv.values), strict=True):
                rows = compressor(last_rows(cache, batch, requests, ends, self._spec.length))
                write_summary(kv, name, rows, batch, requests, ends)
        return queries, self._gates(x)

    def attend(
        self,
        queries: tuple[torch.Tensor, ...],
        kv: LayerChosenKV,
        batch: QueryBatch,
        backend: ChosenKVBackend,
        choices: Choices,
    ) -> torch.Tensor:
        """Output [num_tokens, hidden]: the gated sum of the three attentions of the queries."""
        asking, gates = queries
        compressed, chosen = self.choose(asking, kv, batch)
        found = torch.stack(
            (
                compressed,
                backend.attend_to_blocks(asking, kv, batch, self.params, chosen, self._spec.choice),
                backend.attend(asking, kv, batch, self._near),
            ),
            dim=1,
        )
        weights = rowwise_sigmoid(gates.view(len(gates), 3, -1, 1))
        return self._attention.output((found * weights).sum(dim=1))

    def choose(self, queries: torch.Tensor, kv: LayerChosenKV, batch: QueryBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Output of attention to compressed keys, [num_tokens, num_heads, head_dim], and the numbers of the blocks that
        its weights choose, [num_tokens, num_kv_heads, most] int32; see `attend_to_compressed`.
        """
        spec = self._spec
        return attend_to_compressed(queries, kv, batch, spec.choice, scale=self.params.scale, length=spec.length)


class Compressor:
    """Computes a `CompressorSpec`."""

    def __init__(self, spec: CompressorSpec, parameters: Parameters) -> None:
        self._position = parameters.tensors[spec.position.name]
        self._up = parameters.linear(spec.up)
        self._down = parameters.linear(spec.down)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """`rows` [n, length, num_heads, head_dim] -> [n, num_heads, head_dim]."""
        count, _, num_heads, _ = rows.shape
        flat = (rows + self._position[:, None]).transpose(1, 2).reshape(count * num_heads, -1)
        inner = self._up(flat)
        return self._down(inner * rowwise_sigmoid(inner)).view(count, num_heads, -1)
