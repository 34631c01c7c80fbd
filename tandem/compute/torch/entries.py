"""Attention to rows and entries (DeepSeek-V4) with an ordinary attention backend; PyTorch chooses the entries.

A row belongs to one token; an entry is a row that stands for a span of several tokens. A query attends to a window of
rows and to chosen entries. `native.sparse` derives the CPU's backend from `EntriesAsKV`, with a compiled choice.
"""

from collections.abc import Collection, Iterator
from dataclasses import replace

import torch

from tandem.architecture.entry_states import EntriesSpec
from tandem.architecture.state import KVSpec
from tandem.compute.attention import AttentionBackend, AttentionParams
from tandem.compute.entries import JointCache
from tandem.compute.layer_states import LayerEntries, LayerRows
from tandem.compute.sparse import NOT_CHOSEN, IndexQueries, QueryBatch
from tandem.compute.step import AttentionBatch
from tandem.compute.torch.sparse import WIDE, best_places, narrow

_MOST_NUMBERS = 1 << 22  # of rows or scores, at a time


class EntriesAsKV:
    """Implements `EntriesBackend` with an `AttentionBackend`, `inner`, that supports blocks of one token.

    Each query is passed to it as a separate request, whose block table lists its rows and entries in place.
    """

    def __init__(self, inner: AttentionBackend) -> None:
        self._inner = inner
        self.name = inner.name
        self.graph_safe = False

    def refuses(self, spec: EntriesSpec, block_size: int, softcap: float, *, sinks: bool = False) -> str | None:
        """Reason why it cannot serve such a layer; None = it can."""
        reason = self._inner.refuses(KVSpec(1, spec.size, spec.dtype), 1, softcap, sinks=sinks)
        return None if reason is None else f"{spec}, as K and V of one head: {reason}"

    def prepare(self, batch: AttentionBatch, kv: LayerEntries, layers: Collection[AttentionParams]) -> QueryBatch:
        """Adds the request and the position of each query."""
        return QueryBatch.of(batch)

    def choose(self, index: IndexQueries, entries: LayerEntries, batch: QueryBatch, top_k: int) -> torch.Tensor:
        """Indices of the best entries, see `EntriesBackend.choose`. A product that is NaN counts as 0, a score that is
        NaN as the lowest.
        """
        assert entries.index_keys is not None
        most = min(top_k, batch.max_seq_len // entries.span)
        chosen = torch.full((len(index.weights), most), NOT_CHOSEN, dtype=torch.int32, device=index.weights.device)
        for request, seq_len in enumerate(batch.seq_lens.tolist()):
            num_entries = seq_len // entries.span
            if num_entries:
                keys = _keys(entries, entries.index_keys, batch, request, num_entries).to(WIDE)
                for rows in _rows_of(batch, request, num_entries * index.queries.shape[1]):
                    products = torch.einsum("qhd,kd->qhk", index.queries[rows].to(WIDE), keys)
                    positive = (products * index.scale).where(products > 0, 0.0)
                    scores = torch.einsum("qhk,qh->qk", positive, index.weights[rows].to(WIDE))
                    best = best_places(narrow(scores), _num_entries(batch.positions[rows], entries), most)
                    chosen[rows, : best.shape[1]] = best
        return chosen

    def attend(
        self,
        queries: torch.Tensor,
        rows: LayerRows,
        entries: LayerEntries,
        batches: tuple[QueryBatch, QueryBatch],
        params: AttentionParams,
        chosen: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attention to the window and the entries in one softmax, see `EntriesBackend.attend`."""
        assert params.window is not None
        of_rows, of_entries = batches
        assert len(queries) == len(of_rows.requests) == len(of_entries.requests)
        cache, alone = JointCache.of(rows.rows, entries.entries), replace(params, window=None)
        most = of_entries.max_seq_len // entries.span if chosen is None else chosen.shape[1]
        out = torch.empty_like(queries)
        step = max(1, _MOST_NUMBERS // (params.window + most))
        for start in range(0, len(queries), step):
            part = slice(start, start + step)
            num_rows, near = _window(cache, rows, of_rows, part, params.window)
            num_entries, far = _far(cache, entries, of_entries, part, None if chosen is None else chosen[part])
            tables = _joined(near, num_rows, far)
            seq_lens = (num_rows + num_entries).to(torch.int32)
            batch = QueryBatch.of_single_queries(seq_lens, tables, tables.shape[1])
            prepared = self._inner.prepare(batch, cache.kv, {alone})
            out[part] = self._inner.attend(queries[part], cache.kv, prepared, alone)
        return out


def _num_entries(positions: torch.Tensor, entries: LayerEntries) -> torch.Tensor:
    """Number of entries whose spans end at or before these positions."""
    return (positions + 1) // entries.span


def _keys(
    entries: LayerEntries, numbers: torch.Tensor, batch: QueryBatch, request: int, num_entries: int
) -> torch.Tensor:
    """Rows of the plane `numbers` that are one request's entries, [num_entries, size]."""
    of_request = torch.arange(num_entries, device=numbers.device)
    pages, offsets = entries.places(batch.block_tables, torch.full_like(of_request, request), of_request)
    return numbers[pages, offsets]


def _rows_of(batch: QueryBatch, request: int, size: int) -> Iterator[slice]:
    """Slices of the request's queries, a few at a time. `size`: number of scores of each query."""
    start, end = batch.query_start[request : request + 2].tolist()
    at_once = max(1, _MOST_NUMBERS // size)
    for first in range(start, end, at_once):
        yield slice(first, min(first + at_once, end))


def _window(
    cache: JointCache, rows: LayerRows, batch: QueryBatch, part: slice, window: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """For each query its number of rows, and blocks [num_queries, window], of which its rows are the last."""
    positions, requests, block_size = batch.positions[part], batch.requests[part], rows.rows.shape[1]
    tokens = positions[:, None] + torch.arange(1 - window, 1, device=positions.device)
    tokens.clamp_min_(0)
    pages = batch.block_tables[requests[:, None], tokens // block_size].long()
    return (positions + 1).clamp_max(window), cache.row_numbers(pages, tokens % block_size)


def _far(
    cache: JointCache, entries: LayerEntries, batch: QueryBatch, part: slice, chosen: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """For each query the number of entries that it attends to, and blocks, of which its entries are the first."""
    positions, requests = batch.positions[part], batch.requests[part]
    if chosen is None:
        num_entries = _num_entries(positions, entries)
        numbers = torch.arange(batch.max_seq_len // entries.span, device=positions.device)
        numbers = torch.minimum(numbers, (num_entries - 1).clamp_min(0)[:, None])
    else:
        num_entries = (chosen != NOT_CHOSEN).sum(dim=1)
        numbers = chosen.clamp_min(0).long()
    pages, offsets = entries.places(batch.block_tables, requests[:, None], numbers)
    return num_entries, cache.entry_numbers(pages, offsets)


def _joined(near: torch.Tensor, num_rows: torch.Tensor, far: torch.Tensor) -> torch.Tensor:
    """Block tables, int32: the last `num_rows` of `near`, then `far`."""
    both = torch.cat((near, far), dim=1)
    num_missing = near.shape[1] - num_rows
    columns = torch.arange(both.shape[1], device=both.device) + num_missing[:, None]
    return both.gather(1, columns.clamp_max_(both.shape[1] - 1)).to(torch.int32)
