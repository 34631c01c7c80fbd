"""Self-attention of one layer over a window of rows and over compressed entries, each made from several tokens.

An entry is made in the step of its last token, from the parts that the layer stored for all its tokens. So it does not
depend on how a prompt is divided into steps, and a request can continue from any block, or from fewer tokens than were
computed.
"""

from collections.abc import Sequence

import torch

from tandem.architecture.entry_mixers import EntryAttentionSpec, EntryIndexerSpec, PoolSpec
from tandem.compute.block_scores import closed_spans
from tandem.compute.entries import EntriesBackend
from tandem.compute.layer_states import LayerEntries, LayerRows
from tandem.compute.ops import Kernels
from tandem.compute.sparse import IndexQueries, QueryBatch
from tandem.compute.step import AttentionBatch, Choices
from tandem.models.layers.norm import Norm
from tandem.models.layers.rotary import RotaryTable
from tandem.models.layers.shared_rows import SharedRowAttention, TailRotation
from tandem.models.parameters import Parameters


class EntryAttention:
    """`Mixer` that computes an `EntryAttentionSpec` with the tensors that it names. `rotary`: tables of its rotary
    embedding.

    States, and the batches and backends for them, are in the order of `EntryAttentionSpec.states`.
    """

    def __init__(self, spec: EntryAttentionSpec, parameters: Parameters, rotary: RotaryTable, kernels: Kernels) -> None:
        self._attention = SharedRowAttention(spec, parameters, rotary, kernels)
        self._pool = EntryPool(spec.pool, parameters, rotary, kernels)
        self._indexer = None if spec.indexer is None else EntryIndexer(spec.indexer, parameters, rotary, kernels)
        self._span = spec.pool.span
        self.name = spec.q.name
        num_parts = 2 if spec.indexer is None else 4
        self.params = (None, self._attention.params, *[None] * num_parts)

    def write(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        states: tuple[LayerRows, LayerEntries, *tuple[LayerRows, ...]],
        batches: tuple[QueryBatch, QueryBatch, *tuple[AttentionBatch, ...]],
        backends: Sequence[object],
    ) -> tuple[torch.Tensor, ...]:
        """Writes into `states` everything that the layer keeps for `x` [num_tokens, hidden]. Returns the queries
        [num_tokens, num_heads, head_dim], and with an indexer the index queries [num_tokens, index heads, index_dim]
        and their weights [num_tokens, index heads].
        """
        rows, entries, *parts = states
        of_rows, of_entries, *of_parts = batches
        self._attention.write_rows(x, positions, rows, of_rows)
        latent = self._attention.query_input(x)
        queries = self._attention.queries(latent, positions)
        self._pool.write(x, parts[:2], of_parts[:2])
        if self._indexer is not None:
            self._indexer.pool.write(x, parts[2:], of_parts[2:])
        requests, ends = closed_spans(of_entries, self._span, self._span)
        if len(ends):
            places = entries.places(of_entries.block_tables, requests, ends // self._span)
            entries.entries[places] = self._pool.entries(parts[:2], of_parts[:2], requests, ends)
            if self._indexer is not None:
                assert entries.index_keys is not None
                entries.index_keys[places] = self._indexer.pool.entries(parts[2:], of_parts[2:], requests, ends)
        if self._indexer is None:
            return (queries,)
        return queries, self._indexer.queries(latent, positions), self._indexer.weights(x)

    def attend(
        self,
        queries: tuple[torch.Tensor, ...],
        states: tuple[LayerRows, LayerEntries, *tuple[LayerRows, ...]],
        batches: tuple[QueryBatch, QueryBatch, *tuple[AttentionBatch, ...]],
        backends: tuple[object, EntriesBackend, *tuple[object, ...]],
        choices: Choices,
    ) -> torch.Tensor:
        """Output [num_tokens, hidden] of attention of the queries to rows and entries."""
        attending, *asking = queries
        (rows, entries), (of_rows, of_entries), backend = states[:2], batches[:2], backends[1]
        chosen = None
        if self._indexer is not None:
            index_queries, weights = asking
            index = IndexQueries(index_queries, weights, self._indexer.scale)
            chosen = backend.choose(index, entries, of_entries, self._indexer.top_k)
        params = self._attention.params
        found = backend.attend(attending, rows, entries, (of_rows, of_entries), params, chosen)
        return self._attention.output(found, of_rows.positions)


class EntryPool:
    """Computes a `PoolSpec`. `parts`, in the methods: the stored contents, and the stored gates."""

    def __init__(self, spec: PoolSpec, parameters: Parameters, rotary: RotaryTable, kernels: Kernels) -> None:
        self._spec = spec
        self._maps = [parameters.linear(each) for each in (spec.contents, spec.gates)]
        self._bias = parameters.tensors[spec.bias.name].float()
        self._norm = Norm.take(spec.norm, parameters, kernels)
        self._rotation = TailRotation(rotary, kernels)

    def write(self, x: torch.Tensor, parts: Sequence[LayerRows], batches: Sequence[AttentionBatch]) -> None:
        """Stores contents and gates of `x` [num_tokens, hidden]."""
        for part, linear, batch in zip(parts, self._maps, batches, strict=True):
            part.write(linear(x), batch.slot_mapping)

    def entries(
        self,
        parts: Sequence[LayerRows],
        batches: Sequence[AttentionBatch],
        requests: torch.Tensor,
        ends: torch.Tensor,
    ) -> torch.Tensor:
        """Entries [n, size] of the spans that end at positions `ends` of `requests`, rotated."""
        spec = self._spec
        length = spec.series * spec.span
        tokens = ends[:, None] + torch.arange(1 - length, 1, device=ends.device)
        contents, gates = (
            self._by_series(part.read(batch.block_tables, requests, tokens.clamp_min(0)))
            for part, batch in zip(parts, batches, strict=True)
        )
        is_missing = (tokens < 0)[:, :, None]
        biased = (gates.float() + self._by_series(self._bias.repeat(spec.series, 1)[None])).masked_fill(
            is_missing, -torch.inf
        )
        weights = biased.transpose(1, 2).contiguous().softmax(dim=2).transpose(1, 2)
        pooled = rowwise_sum(contents.float().masked_fill(is_missing, 0.0) * weights)
        normed = self._norm(pooled.to(contents.dtype))
        return self._rotation.forth(normed.unsqueeze(1), ends - spec.span + 1).squeeze(1)

    def _by_series(self, numbers: torch.Tensor) -> torch.Tensor:
        """[n, series x span, series x size] -> [n, series x span, size]: of each span the numbers for this entry."""
        spec = self._spec
        spans = numbers.reshape(len(numbers), spec.series, spec.span, spec.series, spec.size)
        return torch.cat([spans[:, each, :, each] for each in range(spec.series)], dim=1)


def rowwise_sum(x: torch.Tensor) -> torch.Tensor:
    """The sum over dimension 1 of `x` [n, length, size], in a binary tree, so that its bits do not depend on n."""
    while x.shape[1] > 1:
        if x.shape[1] % 2:
            x = torch.nn.functional.pad(x, (0, 0, 0, 1))
        x = x[:, 0::2] + x[:, 1::2]
    return x.squeeze(1)


class EntryIndexer:
    """Computes an `EntryIndexerSpec`."""

    def __init__(self, spec: EntryIndexerSpec, parameters: Parameters, rotary: RotaryTable, kernels: Kernels) -> None:
        self._spec = spec
        self.pool = EntryPool(spec.pool, parameters, rotary, kernels)
        self._rotation = TailRotation(rotary, kernels)
        self._q = parameters.linear(spec.q)
        self._weights = parameters.linear(spec.weights)
        self.top_k = spec.top_k
        self.scale: float = spec.head_dim**-0.5

    def queries(self, latent: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Index queries [num_tokens, num_heads, head_dim] of the latents of queries."""
        return self._rotation.forth(self._q(latent).view(-1, self._spec.num_heads, self._spec.head_dim), positions)

    def weights(self, x: torch.Tensor) -> torch.Tensor:
        """Weights of the index queries, [num_tokens, num_heads] float32, of hidden states."""
        return self._weights(x.float()).mul_(self._spec.num_heads**-0.5)
