"""Attention of each query to blocks of K and V that it chooses: the seam between the model and what computes it.

A choice is a set of blocks of tokens for each KV head, or for each head, see `BlockChoice`. Chosen blocks lie in
ascending order, so what a query finds depends on the set alone.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from tandem.architecture.block_mixers import BlockChoice
from tandem.architecture.state import ChosenKVSpec, KVSpec
from tandem.compute.attention import AttentionBackend, AttentionParams, StateBackend
from tandem.compute.layer_states import LayerChosenKV, LayerKV
from tandem.compute.sparse import NOT_CHOSEN, QueryBatch
from tandem.compute.step import AttentionBatch
from tandem.core.errors import ConfigurationError

_MOST_NUMBER = torch.iinfo(torch.int32).max  # of a block


class ChosenKVBackend(StateBackend[ChosenKVSpec], Protocol):
    """Attends to chosen blocks, and to windows. Stateless between steps. `prepare` returns a `QueryBatch`."""

    def attend(
        self, queries: torch.Tensor, kv: LayerChosenKV, batch: QueryBatch, params: AttentionParams
    ) -> torch.Tensor:
        """As `AttentionBackend.attend`, to all that the window of `params` shows."""
        ...

    def attend_to_blocks(
        self,
        queries: torch.Tensor,
        kv: LayerChosenKV,
        batch: QueryBatch,
        params: AttentionParams,
        chosen: torch.Tensor,
        choice: BlockChoice,
    ) -> torch.Tensor:
        """As `attend`, to the tokens of `chosen` blocks up to the query's position: no other row is read.

        `chosen`: [num_tokens, num_sets, most] int32, ascending, then `NOT_CHOSEN`; a set is of as many heads as others.
        """
        ...


@dataclass(frozen=True, slots=True)
class HeadCache:
    """K and V of several heads seen as those of one head, in blocks of `size` tokens; `numbers` says which of them is
    which.

    All begin at multiples of a common divisor, and so far apart are the blocks of this cache: most of them begin in the
    middle of another and are nobody's.
    """

    kv: LayerKV
    size: int
    page_stride: int  # in common divisors, as the next two
    head_stride: int
    stride: int  # from a block to the next one of a head in a page

    @classmethod
    def of(cls, kv: LayerKV, size: int) -> "HeadCache":
        """Of `kv` in blocks of `size` tokens, a divisor of those of `kv`.

        Raises:
            ConfigurationError: the arena is too large to number its blocks.
        """
        num_blocks, num_heads, block_size, width = kv.keys.shape
        page, length = kv.keys.stride(0), size * width
        unit = math.gcd(page, length)
        last = ((num_blocks - 1) * page + (num_heads * block_size - size) * width) // unit
        if last > _MOST_NUMBER:
            raise ConfigurationError(
                f"{num_blocks} blocks are more than chosen tokens can be found in; give the KV cache at most "
                f"{num_blocks * _MOST_NUMBER // last} blocks"
            )
        shape, strides = (last + 1, 1, size, width), (unit, length, width, 1)
        seen = LayerKV(kv.keys.as_strided(shape, strides), kv.values.as_strided(shape, strides))
        return cls(seen, size, page // unit, block_size * width // unit, length // unit)

    def numbers(self, pages: torch.Tensor, heads: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Blocks of `kv` with the tokens from `offsets` on, multiples of `size`, of `heads` in `pages`; int32."""
        within = heads * self.head_stride + offsets // self.size * self.stride
        return (pages.long() * self.page_stride + within).to(torch.int32)


class BlocksAsKV:
    """Implements `ChosenKVBackend` by `inner`, an `AttentionBackend`.

    Each query and set of heads is a request of its own for it, whose block table names the chosen blocks where they
    lie.
    """

    def __init__(self, inner: AttentionBackend) -> None:
        self._inner = inner
        self.name = inner.name
        self.graph_safe = False

    def refuses(self, spec: ChosenKVSpec, block_size: int, softcap: float, *, sinks: bool = False) -> str | None:
        if block_size % spec.span:
            return f"block_size={block_size} has no whole spans of {spec.span} tokens; choose a multiple of {spec.span}"
        reason = self._inner.refuses(KVSpec(1, spec.head_dim, spec.dtype), block_size, softcap, sinks=sinks)
        return None if reason is None else f"{spec}, as K and V of one head: {reason}"

    def prepare(self, batch: AttentionBatch, kv: LayerChosenKV, layers: Collection[AttentionParams]) -> QueryBatch:
        """Request and position of each query."""
        return QueryBatch.of(batch)

    def attend(
        self, queries: torch.Tensor, kv: LayerChosenKV, batch: QueryBatch, params: AttentionParams
    ) -> torch.Tensor:
        """See `ChosenKVBackend.attend`."""
        return self._inner.attend(queries, kv, self._inner.prepare(batch, kv, {params}), params)

    def attend_to_blocks(
        self,
        queries: torch.Tensor,
        kv: LayerChosenKV,
        batch: QueryBatch,
        params: AttentionParams,
        chosen: torch.Tensor,
        choice: BlockChoice,
    ) -> torch.Tensor:
        """See `ChosenKVBackend.attend_to_blocks`."""
        num_queries, num_sets, most = chosen.shape
        num_kv_heads, block_size = kv.keys.shape[1:3]
        cache = HeadCache.of(kv, math.gcd(block_size, choice.size))
        heads = torch.arange(num_sets, device=chosen.device) * num_kv_heads // num_sets
        tokens = _first_tokens(chosen, choice.size, cache.size).clamp_max_(batch.max_seq_len - 1)
        pages = batch.block_tables[batch.requests[:, None, None], tokens // block_size]
        tables = cache.numbers(pages, heads[:, None], tokens % block_size)
        seq_lens = num_chosen_tokens(chosen, batch.positions, choice.size).flatten()
        alone = batch.of_single_queries(seq_lens.to(torch.int32), tables.flatten(0, 1), most * choice.size)
        own = replace(params, num_heads=params.num_heads // num_sets, window=None)
        asking = queries.reshape(num_queries * num_sets, own.num_heads, -1)
        found = self._inner.attend(asking, cache.kv, self._inner.prepare(alone, cache.kv, {own}), own)
        return found.view(queries.shape)


def _first_tokens(chosen: torch.Tensor, size: int, part: int) -> torch.Tensor:
    """Of each part of `part` tokens of `chosen` blocks [..., most]: its first token, [..., most * size / part]."""
    starts = torch.arange(0, size, part, device=chosen.device)
    return (chosen.clamp_min(0).long()[..., None] * size + starts).flatten(-2)


def num_chosen_tokens(chosen: torch.Tensor, positions: torch.Tensor, size: int) -> torch.Tensor:
    """Of each query and set, [num_tokens, num_sets]: tokens of its `chosen` blocks up to its position."""
    whole = (chosen != NOT_CHOSEN).sum(dim=2) * size
    has_own = (chosen == (positions // size)[:, None, None]).any(dim=2)
    return whole - has_own * (size - 1 - positions % size)[:, None]
