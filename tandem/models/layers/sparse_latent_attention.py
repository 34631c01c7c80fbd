"""Sparse latent attention of one layer: each query attends to the rows with the best scores of an indexer."""

import torch

from tandem.architecture.sparse_mixers import IndexerSpec, SparseLatentAttentionSpec
from tandem.compute.layer_states import LayerIndexedLatents
from tandem.compute.ops import Kernels
from tandem.compute.sparse import IndexedLatentBackend, IndexQueries, QueryBatch
from tandem.compute.step import Choices
from tandem.models.layers.latent_attention import LatentAttention, rotated_half_split
from tandem.models.layers.norm import LayerNorm
from tandem.models.layers.rotary import RotaryTable
from tandem.models.parameters import Parameters


class SparseLatentAttention:
    """`Mixer` that computes a `SparseLatentAttentionSpec` with the tensors that it names. `rotary`: tables of its
    rotary embedding.

    As long as there are no more tokens than a query may choose, it attends to all, in the same way: no bit of a token's
    result depends on later tokens.
    """

    def __init__(
        self, spec: SparseLatentAttentionSpec, parameters: Parameters, rotary: RotaryTable, kernels: Kernels
    ) -> None:
        self._attention = LatentAttention(spec, parameters, rotary, kernels)
        self._indexer: Indexer | None = None
        if spec.indexer is not None:
            self._indexer = Indexer(spec.indexer, parameters, rotary, kernels, rotary_dim=spec.rotary_dim)
        self._chosen_by = spec.chosen_by
        self._top_k = spec.top_k
        self.params = self._attention.params

    def write(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        latents: LayerIndexedLatents,
        batch: QueryBatch,
        backend: IndexedLatentBackend,
    ) -> tuple[torch.Tensor, ...]:
        """Writes rows and index keys of `x` [num_tokens, hidden] into `latents`. Returns the queries [num_tokens,
        num_heads, plain_dim + rotary_dim], and with an indexer the index queries [num_tokens, index heads, index_dim]
        and their weights [num_tokens, index heads].
        """
        self._attention.write_rows(x, positions, latents, batch)
        made_of = self._attention.query_input(x)
        queries = self._attention.queries(made_of, positions)
        if self._indexer is None:
            return (queries,)
        latents.write_index_keys(self._indexer.keys(x, positions), batch.slot_mapping)
        return queries, self._indexer.queries(made_of, positions), self._indexer.weights(x)

    def attend(
        self,
        queries: tuple[torch.Tensor, ...],
        latents: LayerIndexedLatents,
        batch: QueryBatch,
        backend: IndexedLatentBackend,
        choices: Choices,
    ) -> torch.Tensor:
        """Output [num_tokens, hidden] of attention to the rows that this layer, or an earlier one, chose. `choices`:
        the choices of earlier layers, by indexer; this layer's is added if it has an indexer.
        """
        attending, *asking = queries
        if self._indexer is not None:
            index_queries, weights = asking
            index = IndexQueries(index_queries, weights, self._indexer.scale)
            choices[self._chosen_by] = backend.choose(index, latents, batch, self._top_k)
        mapped, chosen = self._attention.mapped(attending), choices[self._chosen_by]
        return self._attention.output(backend.attend(mapped, latents, batch, self.params, chosen))


class Indexer:
    """Computes an `IndexerSpec`."""

    def __init__(
        self, spec: IndexerSpec, parameters: Parameters, rotary: RotaryTable, kernels: Kernels, *, rotary_dim: int
    ) -> None:
        self._spec = spec
        self._rotary_dim = rotary_dim
        self._rotary = rotary
        self._kernels = kernels
        self._q = parameters.linear(spec.q)
        self._k = parameters.linear(spec.k)
        self._k_norm = LayerNorm.take(spec.k_norm, parameters)
        self._weights = parameters.linear(spec.weights)
        self.scale: float = spec.head_dim**-0.5

    def keys(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Index keys [num_tokens, head_dim] of hidden states [num_tokens, hidden]."""
        return self._rotated(self._k_norm(self._k(x)).unsqueeze(1), positions).squeeze(1)

    def queries(self, latent: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Index queries [num_tokens, num_heads, head_dim] of the latents of queries."""
        return self._rotated(self._q(latent).view(-1, self._spec.num_heads, self._spec.head_dim), positions)

    def weights(self, x: torch.Tensor) -> torch.Tensor:
        """Weights of the index queries, [num_tokens, num_heads] float32, of hidden states."""
        return self._weights(x.float()).mul_(self._spec.num_heads**-0.5)

    def _rotated(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """`x` [num_tokens, heads, head_dim] with its first elements rotated."""
        first, rest = x.tensor_split([self._rotary_dim], dim=2)
        first = rotated_half_split(
            first, positions, self._rotary, self._kernels, is_interleaved=self._spec.is_interleaved
        )
        return torch.cat((first, rest), dim=2)
