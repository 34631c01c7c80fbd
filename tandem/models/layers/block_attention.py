"""Block-sparse attention of one layer: queries attend to blocks of tokens that they choose, by the scores of an indexer
or by their products with the mean of each block's keys.
"""

import torch

from tandem.architecture.block_mixers import MEANS, BlockAttentionSpec, BlockIndexerSpec
from tandem.compute.block_scores import choose_by_index, choose_by_means, closed_spans, last_rows, write_summary
from tandem.compute.block_sparse import ChosenKVBackend
from tandem.compute.layer_states import LayerChosenKV
from tandem.compute.ops import Kernels
from tandem.compute.sparse import QueryBatch
from tandem.compute.step import Choices
from tandem.models.layers.attention import Attention
from tandem.models.layers.norm import Norm
from tandem.models.layers.rotary import RotaryTable
from tandem.models.parameters import Parameters


class BlockAttention:
    """`Mixer` that computes a `BlockAttentionSpec` with the tensors that it names. `rotary`: tables of its rotary
    embedding.
    """

    def __init__(self, spec: BlockAttentionSpec, parameters: Parameters, rotary: RotaryTable, kernels: Kernels) -> None:
        self._attention = Attention(spec.attention, parameters, rotary, kernels)
        self._indexer = None if spec.indexer is None else BlockIndexer(spec.indexer, parameters, rotary, kernels)
        self._choice = spec.choice
        self.params = self._attention.params
        self.name = spec.attention.q.name

    def write(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        kv: LayerChosenKV,
        batch: QueryBatch,
        backend: ChosenKVBackend,
    ) -> tuple[torch.Tensor, ...]:
        """Writes into `kv` the K and V of `x` [num_tokens, hidden], and its index keys or the means of keys by which
        blocks are chosen. Returns the queries [num_tokens, num_heads, head_dim], and with an indexer the index queries
        [num_tokens, num_kv_heads, index_dim].
        """
        queries = self._attention.write(x, positions, kv, batch, backend)
        if self._indexer is None:
            requests, ends = closed_spans(batch, kv.span, kv.span)
            means = last_rows(kv.keys, batch, requests, ends, kv.span).double().mean(dim=1)
            write_summary(kv, MEANS, means, batch, requests, ends)
            return (queries,)
        kv.write_index_keys(self._indexer.keys(x, positions), batch.slot_mapping)
        return queries, self._indexer.queries(x, positions)

    def attend(
        self,
        queries: tuple[torch.Tensor, ...],
        kv: LayerChosenKV,
        batch: QueryBatch,
        backend: ChosenKVBackend,
        choices: Choices,
    ) -> torch.Tensor:
        """Output [num_tokens, hidden] of attention to the blocks that `queries`, which `write` returned, choose.
        `choices` is not used: each layer chooses for itself.
        """
        attending, *asking = queries
        chosen = self.choose(asking[0] if asking else attending, kv, batch)
        return self._attention.output(backend.attend_to_blocks(attending, kv, batch, self.params, chosen, self._choice))

    def choose(self, queries: torch.Tensor, kv: LayerChosenKV, batch: QueryBatch) -> torch.Tensor:
        """Numbers of the blocks that `queries` choose (index queries if there is an indexer): [num_tokens, num_sets,
        most] int32, ascending, filled up with `NOT_CHOSEN`. `num_sets`: KV heads with an indexer, else heads.
        """
        choose = choose_by_means if self._indexer is None else choose_by_index
        return choose(queries, kv, batch, self._choice)


class BlockIndexer:
    """Computes a `BlockIndexerSpec`."""

    def __init__(self, spec: BlockIndexerSpec, parameters: Parameters, rotary: RotaryTable, kernels: Kernels) -> None:
        self._head_dim = spec.head_dim
        self._rotary = rotary
        self._kernels = kernels
        self._q = parameters.linear(spec.q)
        self._k = parameters.linear(spec.k)
        self._q_norm = Norm.take(spec.q_norm, parameters, kernels)
        self._k_norm = Norm.take(spec.k_norm, parameters, kernels)

    def keys(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Index keys [num_tokens, head_dim] of hidden states [num_tokens, hidden]."""
        return self._rotated(self._k(x), self._k_norm, positions).squeeze(1)

    def queries(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Index queries [num_tokens, num_kv_heads, head_dim] of hidden states [num_tokens, hidden]."""
        return self._rotated(self._q(x), self._q_norm, positions)

    def _rotated(self, x: torch.Tensor, norm: Norm, positions: torch.Tensor) -> torch.Tensor:
        heads = x.view(len(x), -1, self._head_dim)
        self._kernels.rotate(
            heads,
            self._rotary.cos,
            self._rotary.sin,
            positions,
            norm=norm.weight,
            norm_eps=norm.spec.eps,
            unit_offset=norm.spec.unit_offset,
        )
        return heads
