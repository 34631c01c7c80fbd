"""Interface of sparse latent attention, in which each query attends to chosen tokens (DeepSeek-V3.2), and the base of
implementations with an ordinary attention backend.

A choice is a set: tokens are chosen by falling score, the earlier one if scores are equal, and listed in ascending
order. So a query's result does not depend on the order in which they were found.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

import torch

from tandem.architecture.state import IndexedLatentSpec, KVSpec
from tandem.compute.attention import AttentionBackend, AttentionParams, StateBackend
from tandem.compute.layer_states import LayerIndexedLatents, LayerKV
from tandem.compute.step import AttentionBatch
from tandem.core.errors import ConfigurationError

NOT_CHOSEN = -1  # fills up rows of fewer choices
_MOST_NUMBER = torch.iinfo(torch.int32).max  # of a block


@dataclass(frozen=True, slots=True)
class QueryBatch(AttentionBatch):
    """A batch with the request and the position of each of its query tokens."""

    requests: torch.Tensor  # [num_tokens] int64
    positions: torch.Tensor  # [num_tokens] int64

    @classmethod
    def of(cls, batch: AttentionBatch) -> "QueryBatch":
        """`batch` with the request and position of each query added."""
        lengths = batch.query_start.diff().long()
        requests = torch.repeat_interleave(lengths)
        from_end = batch.query_start.long()[requests + 1] - torch.arange(len(requests), device=requests.device)
        return cls(
            batch.query_start,
            batch.seq_lens,
            batch.block_tables,
            batch.slot_mapping,
            batch.max_query_len,
            batch.max_seq_len,
            requests=requests,
            positions=batch.seq_lens.long()[requests] - from_end,
        )

    @staticmethod
    def of_single_queries(seq_lens: torch.Tensor, block_tables: torch.Tensor, max_seq_len: int) -> AttentionBatch:
        """A batch of requests with one query each, which see `seq_lens` [n] tokens in the blocks of `block_tables` [n,
        max_blocks], both int32.
        """
        return AttentionBatch(
            query_start=torch.arange(len(seq_lens) + 1, dtype=torch.int32, device=seq_lens.device),
            seq_lens=seq_lens,
            block_tables=block_tables,
            slot_mapping=torch.empty(0, dtype=torch.int64, device=seq_lens.device),
            max_query_len=1,
            max_seq_len=max_seq_len,
        )


@dataclass(frozen=True, slots=True)
class IndexQueries:
    """Index queries of a step. The score of an index key, which all heads share, is the sum over heads of `weights`
    times the product with the head's query times `scale`, or 0 where that is negative.
    """

    queries: torch.Tensor  # [num_tokens, num_heads, index_dim]
    weights: torch.Tensor  # [num_tokens, num_heads] float32
    scale: float


class IndexedLatentBackend(StateBackend[IndexedLatentSpec], Protocol):
    """Chooses tokens and attends to their latents. Stateless between steps. `prepare` returns a `QueryBatch`."""

    def choose(self, index: IndexQueries, latents: LayerIndexedLatents, batch: QueryBatch, top_k: int) -> torch.Tensor:
        """Positions that each query attends to, [num_tokens, min(top_k, max_seq_len)] int32, ascending: the best of
        those up to its own. If there are fewer, `NOT_CHOSEN` follows.
        """
        ...

    def attend(
        self,
        queries: torch.Tensor,
        latents: LayerIndexedLatents,
        batch: QueryBatch,
        params: AttentionParams,
        chosen: torch.Tensor,
    ) -> torch.Tensor:
        """Attention of `queries` [num_tokens, num_heads, rank + rotary_dim] to the positions in `chosen` alone, as
        `choose` returns them: no other row is read. Returns sums of latents [num_tokens, num_heads, rank].
        """
        ...


@dataclass(frozen=True, slots=True)
class RowCache:
    """View of rows of latents as K and V of one head in blocks of one token; `numbers` gives the index of a row in it.

    All rows begin at multiples of a common divisor, which is the distance between neighbouring blocks of this view.
    Most of its blocks begin in the middle of a row and are never used.
    """

    kv: LayerKV  # the view
    page_stride: int  # in indices of the view, from a page to the next
    row_stride: int  # from a row to the next of a page

    @classmethod
    def of(cls, rows: torch.Tensor) -> "RowCache":
        """The view of `rows` [num_blocks, block_size, size].

        Raises:
            ConfigurationError: the KV cache is too large to number its rows.
        """
        num_blocks, block_size, size = rows.shape
        page = rows.stride(0)
        unit = math.gcd(page, size)
        last = ((num_blocks - 1) * page + (block_size - 1) * size) // unit
        if last > _MOST_NUMBER:
            raise ConfigurationError(
                f"{num_blocks} blocks are more than chosen tokens can be found in; give the KV cache at most "
                f"{num_blocks * _MOST_NUMBER // last} blocks"
            )
        blocks = rows.as_strided((last + 1, 1, 1, size), (unit, size, size, 1))
        return cls(LayerKV(blocks, blocks), page // unit, size // unit)

    def numbers(self, pages: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Indices in this view, int32, of the rows at `offsets` of `pages`, integers whose shapes broadcast."""
        return (pages.long() * self.page_stride + offsets * self.row_stride).to(torch.int32)


class ChosenRowsAsKV:
    """Base of `IndexedLatentBackend`s: attends with an `AttentionBackend`, `inner`, that supports blocks of one token.

    Each query is passed to it as a separate request, whose block table lists the chosen rows in place.
    """

    def __init__(self, inner: AttentionBackend) -> None:
        self._inner = inner
        self.name = inner.name
        self.graph_safe = False

    def refuses(self, spec: IndexedLatentSpec, block_size: int, softcap: float, *, sinks: bool = False) -> str | None:
        """Reason why it cannot serve such a layer; None = it can."""
        reason = self._inner.refuses(KVSpec(1, spec.size, spec.dtype), 1, softcap, sinks=sinks)
        return None if reason is None else f"{spec}, as K and V of one head: {reason}"

    def prepare(
        self, batch: AttentionBatch, kv: LayerIndexedLatents, layers: Collection[AttentionParams]
    ) -> QueryBatch:
        """Adds the request and the position of each query."""
        return QueryBatch.of(batch)

    def attend(
        self,
        queries: torch.Tensor,
        latents: LayerIndexedLatents,
        batch: QueryBatch,
        params: AttentionParams,
        chosen: torch.Tensor,
    ) -> torch.Tensor:
        """Attention to the chosen rows alone, see `IndexedLatentBackend.attend`."""
        num_queries, most = chosen.shape
        assert len(queries) == num_queries == len(batch.requests)
        cache, block_size = RowCache.of(latents.rows), latents.rows.shape[1]
        positions = chosen.clamp_min(0).long()
        pages = batch.block_tables[batch.requests[:, None], positions // block_size]
        seq_lens = (batch.positions + 1).clamp_max(most).to(torch.int32)
        alone = batch.of_single_queries(seq_lens, cache.numbers(pages, positions % block_size), most)
        prepared = self._inner.prepare(alone, cache.kv, {params})
        return self._inner.attend(queries, cache.kv, prepared, params)[..., : latents.rank]
