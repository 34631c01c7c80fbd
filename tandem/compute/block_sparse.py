"""Interface of block-sparse attention, in which each query attends to chosen blocks of K and V, and its implementation
with an ordinary attention backend.

Here a block is `BlockChoice.size` consecutive tokens of a request, numbered from 0; blocks of the KV cache are called
pages. The layer says which blocks are chosen: a set for each query and KV head, or for each query and head. They are
listed in ascending order, so a query's result depends on the set alone.
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
        """Causal attention of `queries` [num_tokens, num_heads, head_dim] to all tokens in the window of `params`;
        returns the same shape and dtype.
        """
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
        """As `attend`, to the tokens of the `chosen` blocks up to the query's position: K and V of no others are read.

        Args:
            chosen: block numbers, [num_tokens, num_sets, most] int32, ascending, filled up with `NOT_CHOSEN`. Each set
                is for `num_heads / num_sets` consecutive heads, so `num_sets` is the number of KV heads or of heads.
            choice: the rule by which they were chosen; only its `size` matters here.
        """
        ...


@dataclass(frozen=True, slots=True)
class HeadCache:
    """View of the K and V of several heads as those of a single head, in parts of `size` tokens; `numbers` gives the
    index of a part in it.

    All real parts begin at multiples of a common divisor, which is the distance between neighbouring parts of this
    view. Most of these begin in the middle of a real one and are never used.
    """

    kv: LayerKV  # the view, with one head
    size: int
    page_stride: int  # in indices of the view, as the next two: from a page to the next
    head_stride: int
    stride: int  # from a part to the next one of a head in a page

    @classmethod
    def of(cls, kv: LayerKV, size: int) -> "HeadCache":
        """The view of `kv` in parts of `size` tokens, a divisor of the tokens of a page.

        Raises:
            ConfigurationError: the KV cache is too large to number its parts in int32.
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
        """Indices in this view, int32, of the parts that begin at token `offsets` of a page, multiples of `size`.
        `pages`: page numbers; `heads`: KV heads. The three have shapes that broadcast.
        """
        within = heads * self.head_stride + offsets // self.size * self.stride
        return (pages.long() * self.page_stride + within).to(torch.int32)


class BlocksAsKV:
    """Implements `ChosenKVBackend` with an `AttentionBackend`, `inner`.

    Each query and set of heads is passed to it as a separate request, whose block table lists the chosen blocks in
    place.
    """

    def __init__(self, inner: AttentionBackend) -> None:
        self._inner = inner
        self.name = inner.name
        self.graph_safe = False

    def refuses(self, spec: ChosenKVSpec, block_size: int, softcap: float, *, sinks: bool = False) -> str | None:
        """Reason why it cannot serve such a layer: pages without whole spans, or that of `inner`; None = it can."""
        if block_size % spec.span:
            return f"block_size={block_size} has no whole spans of {spec.span} tokens; choose a multiple of {spec.span}"
        reason = self._inner.refuses(KVSpec(1, spec.head_dim, spec.dtype), block_size, softcap, sinks=sinks)
        return None if reason is None else f"{spec}, as K and V of one head: {reason}"

    def prepare(self, batch: AttentionBatch, kv: LayerChosenKV, layers: Collection[AttentionParams]) -> QueryBatch:
        """Adds the request and the position of each query."""
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
    """The first token of each part of `part` tokens in the `chosen` blocks [..., most]: [..., most * size / part]."""
    starts = torch.arange(0, size, part, device=chosen.device)
    return (chosen.clamp_min(0).long()[..., None] * size + starts).flatten(-2)


def num_chosen_tokens(chosen: torch.Tensor, positions: torch.Tensor, size: int) -> torch.Tensor:
    """Number of tokens in each set's `chosen` blocks up to the query's position, [num_tokens, num_sets] int64.

    `positions`: of the queries, [num_tokens] int64. `size`: tokens of a block.
    """
    whole = (chosen != NOT_CHOSEN).sum(dim=2) * size
    has_own = (chosen == (positions // size)[:, None, None]).any(dim=2)
    return whole - has_own * (size - 1 - positions % size)[:, None]
