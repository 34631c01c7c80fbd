"""Attention of each query to tokens that it chooses: the seam between the model and what computes it.

A choice is a set, so what a query attends to does not depend on the order in which it was found: tokens, or blocks of
them, are chosen by falling score, of equal scores the earlier first, and lie in ascending order.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from tandem.architecture.state import IndexedKVSpec, IndexedLatentSpec, KVSpec
from tandem.compute.arena import LayerIndexedKV, LayerIndexedLatents, LayerKV
from tandem.compute.attention import AttentionBackend, AttentionParams, StateBackend
from tandem.compute.step import AttentionBatch
from tandem.core.errors import ConfigurationError

NOT_CHOSEN = -1
_MOST_NUMBER = torch.iinfo(torch.int32).max  # of a block


@dataclass(frozen=True, slots=True)
class QueryBatch(AttentionBatch):
    """A batch with the request and the position of each of its queries."""

    requests: torch.Tensor  # [num_tokens] int64
    positions: torch.Tensor  # [num_tokens] int64


@dataclass(frozen=True, slots=True)
class IndexQueries:
    """What a step's queries score index keys with. `scale` multiplies the products of queries and keys."""

    queries: torch.Tensor  # [num_tokens, num_heads, index_dim]
    weights: torch.Tensor  # [num_tokens, num_heads] float32
    scale: float


@dataclass(frozen=True, slots=True)
class BlockRule:
    """Blocks of `block_size` tokens of which `top_blocks` are chosen at most, the last `local_blocks` in any case."""

    block_size: int
    top_blocks: int
    local_blocks: int


class IndexedLatentBackend(StateBackend[IndexedLatentSpec], Protocol):
    """Chooses rows of latents and attends to them. Stateless between steps. `prepare` returns a `QueryBatch`."""

    def choose(self, index: IndexQueries, latents: LayerIndexedLatents, batch: QueryBatch, top_k: int) -> torch.Tensor:
        """Positions that each query attends to, [num_tokens, min(top_k, max_seq_len)] int32, ascending: the best of
        those up to its own. Where these are fewer, `NOT_CHOSEN` follows.
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
        """As `LatentBackend.attend`, to the positions in `chosen` alone: no other row is read."""
        ...


class IndexedKVBackend(StateBackend[IndexedKVSpec], Protocol):
    """Chooses blocks of K and V and attends to them. Stateless between steps. `prepare` returns a `QueryBatch`."""

    def choose(self, queries: torch.Tensor, kv: LayerIndexedKV, batch: QueryBatch, rule: BlockRule) -> torch.Tensor:
        """Numbers of the blocks that each query attends to for each KV head, [num_tokens, num_kv_heads, most] int32,
        ascending, by `queries` [num_tokens, num_kv_heads, index_dim]. Where they are fewer, `NOT_CHOSEN` follows.
        """
        ...

    def attend(
        self,
        queries: torch.Tensor,
        kv: LayerIndexedKV,
        batch: QueryBatch,
        params: AttentionParams,
        chosen: torch.Tensor,
        block_size: int,
    ) -> torch.Tensor:
        """As `AttentionBackend.attend`, to the tokens up to a query's own in the blocks `chosen`, the last of which is
        its own, of `block_size` tokens each. Nothing else is read.
        """
        ...


@dataclass(frozen=True, slots=True)
class Parts:
    """An arena seen as a cache of one head with smaller blocks; `numbers` says which of them is which part of a page.

    All parts begin at multiples of a common divisor, and so far apart are the blocks of this cache: most of them begin
    in the middle of something and are nobody's.
    """

    kv: LayerKV  # of one head
    page_stride: int  # in common divisors, as the others
    head_stride: int
    part_stride: int
    size: int  # tokens of a part

    @classmethod
    def of(cls, keys: torch.Tensor, values: torch.Tensor, size: int) -> "Parts":
        """Of `keys` and `values` [num_blocks, num_kv_heads, block_size, head_dim], which lie alike.

        Raises:
            ConfigurationError: the arena is too large to number its parts.
        """
        num_blocks, num_heads, block_size, head_dim = keys.shape
        assert block_size % size == 0
        assert keys.stride() == values.stride()
        page, head, part = keys.stride(0), block_size * head_dim, size * head_dim
        unit = math.gcd(page, part)
        last = ((num_blocks - 1) * page + num_heads * head - part) // unit
        if last > _MOST_NUMBER:
            raise ConfigurationError(
                f"{num_blocks} blocks are more than chosen tokens can be found in; give the KV cache at most "
                f"{num_blocks * _MOST_NUMBER // last} blocks"
            )
        shape, stride = (last + 1, 1, size, head_dim), (unit, part, head_dim, 1)
        kv = LayerKV(keys.as_strided(shape, stride), values.as_strided(shape, stride))
        return cls(kv, page // unit, head // unit, part // unit, size)

    def numbers(self, pages: torch.Tensor, offsets: torch.Tensor, heads: torch.Tensor | int = 0) -> torch.Tensor:
        """Blocks of `kv` with the tokens at `offsets` of `pages`, for K and V of `heads`; int32."""
        found = pages.long() * self.page_stride + offsets // self.size * self.part_stride + heads * self.head_stride
        return found.to(torch.int32)


class ChosenAsKV:
    """Base of backends that attend to what is chosen by `inner`, an `AttentionBackend` for small blocks.

    Each query is a request of its own for it, for each KV head, whose block table names what is chosen where it lies.
    """

    def __init__(self, inner: AttentionBackend) -> None:
        self._inner = inner
        self.name = inner.name
        self.graph_safe = False

    def prepare(self, batch: AttentionBatch, kv: Any, layers: Collection[AttentionParams]) -> QueryBatch:
        """Which request and position each query is of."""
        lengths = batch.query_start.diff().long()
        requests = torch.repeat_interleave(lengths)
        from_end = batch.query_start.long()[requests + 1] - torch.arange(len(requests), device=requests.device)
        return QueryBatch(
            batch.query_start,
            batch.seq_lens,
            batch.block_tables,
            batch.slot_mapping,
            batch.max_query_len,
            batch.max_seq_len,
            requests=requests,
            positions=batch.seq_lens.long()[requests] - from_end,
        )

    def attend_alone(
        self, queries: torch.Tensor, parts: Parts, table: torch.Tensor, lengths: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """Attention of `queries` [n, num_heads, head_dim], each to the first `lengths` [n] tokens of the parts in its
        row of `table` [n, most].
        """
        num_queries, most = table.shape
        alone = AttentionBatch(
            query_start=torch.arange(num_queries + 1, dtype=torch.int32, device=table.device),
            seq_lens=lengths.to(torch.int32),
            block_tables=table,
            slot_mapping=torch.empty(0, dtype=torch.int64, device=table.device),
            max_query_len=1,
            max_seq_len=most * parts.size,
        )
        return self._inner.attend(queries, parts.kv, self._inner.prepare(alone, parts.kv, {params}), params)


class ChosenRowsAsKV(ChosenAsKV):
    """Base of `IndexedLatentBackend`s: rows are K and V of one head in blocks of one token."""

    def refuses(self, spec: IndexedLatentSpec, block_size: int, softcap: float, *, sinks: bool = False) -> str | None:
        reason = self._inner.refuses(KVSpec(1, spec.size, spec.dtype), 1, softcap, sinks=sinks)
        return None if reason is None else f"{spec}, as K and V of one head: {reason}"

    def attend(
        self,
        queries: torch.Tensor,
        latents: LayerIndexedLatents,
        batch: QueryBatch,
        params: AttentionParams,
        chosen: torch.Tensor,
    ) -> torch.Tensor:
        """See `IndexedLatentBackend.attend`."""
        assert len(queries) == len(chosen) == len(batch.requests)
        rows, block_size = latents.rows.unsqueeze(1), latents.rows.shape[1]
        parts, positions = Parts.of(rows, rows, 1), chosen.clamp_min(0).long()
        pages = batch.block_tables[batch.requests[:, None], positions // block_size]
        table = parts.numbers(pages, positions % block_size)
        lengths = (batch.positions + 1).clamp_max(chosen.shape[1])
        return self.attend_alone(queries, parts, table, lengths, params)[..., : latents.rank]


class ChosenBlocksAsKV(ChosenAsKV):
    """Base of `IndexedKVBackend`s: blocks that are chosen are cut into parts that no page boundary divides."""

    def refuses(self, spec: IndexedKVSpec, block_size: int, softcap: float, *, sinks: bool = False) -> str | None:
        return self._inner.refuses(KVSpec(1, spec.head_dim, spec.dtype), 1, softcap, sinks=sinks)

    def attend(
        self,
        queries: torch.Tensor,
        kv: LayerIndexedKV,
        batch: QueryBatch,
        params: AttentionParams,
        chosen: torch.Tensor,
        block_size: int,
    ) -> torch.Tensor:
        """See `IndexedKVBackend.attend`."""
        num_queries, num_heads, head_dim = queries.shape
        _, num_kv_heads, page_size, _ = kv.keys.shape
        assert chosen.shape[:2] == (num_queries, num_kv_heads) == (len(batch.requests), num_kv_heads)
        parts = Parts.of(kv.keys, kv.values, math.gcd(page_size, block_size))
        starts = torch.arange(0, block_size, parts.size, device=chosen.device)
        own = batch.positions[:, None, None]
        positions = (chosen.clamp_min(0).long()[..., None] * block_size + starts).flatten(2).minimum(own)
        pages = batch.block_tables[batch.requests[:, None, None], positions // page_size]
        heads = torch.arange(num_kv_heads, device=chosen.device)[:, None]
        table = parts.numbers(pages, positions % page_size, heads)
        num_whole = chosen.ge(0).sum(2) - 1  # NOTE: the last one is that of the query itself, which ends with it
        lengths = num_whole * block_size + batch.positions[:, None] % block_size + 1
        group = AttentionParams(num_heads // num_kv_heads, params.scale)
        grouped = queries.reshape(num_queries * num_kv_heads, -1, head_dim)
        return self.attend_alone(grouped, parts, table.flatten(0, 1), lengths.flatten(), group).view_as(queries)
