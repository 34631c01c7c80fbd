"""Interface of the attention of DeepSeek-V4, in which each query attends to a window of rows, one per token, and to
entries, rows that each stand for a span of several tokens; and adapters to ordinary attention backends.

A row or entry serves as the key and value of all heads. See `tandem.architecture.entry_mixers`.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from tandem.architecture.entry_states import EntriesSpec, EntryInputsSpec, RowsSpec
from tandem.architecture.state import KVSpec
from tandem.compute.attention import AttentionBackend, AttentionParams, StateBackend
from tandem.compute.layer_states import LayerEntries, LayerKV, LayerRows
from tandem.compute.sparse import IndexQueries, QueryBatch
from tandem.compute.step import AttentionBatch
from tandem.core.errors import ConfigurationError

_MOST_NUMBER = torch.iinfo(torch.int32).max  # of a block


@dataclass(frozen=True, slots=True)
class RowsBatch(QueryBatch):
    """Batch for the window of rows. `of_window`: the batch as prepared by the inner backend that attends to the window
    alone; None = no layer does.
    """

    of_window: AttentionBatch | None = field(default=None, kw_only=True)


class RowsBackend(StateBackend[RowsSpec], Protocol):
    """Attends to a window of rows. Stateless between steps. `prepare` returns a `RowsBatch`; its `layers` contain None
    for layers that also attend to entries.
    """

    def attend(self, queries: torch.Tensor, rows: LayerRows, batch: RowsBatch, params: AttentionParams) -> torch.Tensor:
        """Causal attention of `queries` [num_tokens, num_heads, size]; returns the same shape and dtype."""
        ...


class EntriesBackend(StateBackend[EntriesSpec], Protocol):
    """Chooses entries and attends to them. Stateless between steps. `prepare` returns a `QueryBatch`."""

    def choose(self, index: IndexQueries, entries: LayerEntries, batch: QueryBatch, top_k: int) -> torch.Tensor:
        """Indices of the entries that each query attends to, [num_tokens, most] int32, ascending: the best of those
        whose spans end at or before its position. If there are fewer, `NOT_CHOSEN` follows. `most` is at most `top_k`.
        """
        ...

    def attend(
        self,
        queries: torch.Tensor,
        rows: LayerRows,
        entries: LayerEntries,
        batches: tuple[QueryBatch, QueryBatch],
        params: AttentionParams,
        chosen: torch.Tensor | None,
    ) -> torch.Tensor:
        """Causal attention of `queries` [num_tokens, num_heads, size] to the window of `params` and, in the same
        softmax, to entries; returns the same shape and dtype. `chosen`: indices of the entries, as `choose` returns
        them; None = all whose spans end at or before the query's position. `batches`: of rows and of entries.
        """
        ...


class RowsAsKV:
    """Implements `RowsBackend` with an `AttentionBackend`, `inner`."""

    def __init__(self, inner: AttentionBackend) -> None:
        self._inner = inner
        self.name = inner.name
        self.graph_safe = False

    def refuses(self, spec: RowsSpec, block_size: int, softcap: float, *, sinks: bool = False) -> str | None:
        """Reason why it cannot serve such a layer; None = it can."""
        of_one_head = KVSpec(1, spec.size, spec.dtype, spec.window)
        reason = self._inner.refuses(of_one_head, block_size, softcap, sinks=sinks)
        return None if reason is None else f"{spec}, as K and V of one head: {reason}"

    def prepare(self, batch: AttentionBatch, kv: LayerRows, layers: Collection[AttentionParams | None]) -> RowsBatch:
        """Adds request and position of each query, and the inner backend's batch for layers with a window only."""
        found = RowsBatch.of(batch)
        assert isinstance(found, RowsBatch)
        asked = {params for params in layers if params is not None}
        return replace(found, of_window=self._inner.prepare(batch, kv.as_kv, asked)) if asked else found

    def attend(self, queries: torch.Tensor, rows: LayerRows, batch: RowsBatch, params: AttentionParams) -> torch.Tensor:
        """See `RowsBackend.attend`."""
        assert batch.of_window is not None
        return self._inner.attend(queries, rows.as_kv, batch.of_window, params)


class EntryInputsBackend:
    """Backend of the inputs of entries: it does nothing, since layers read these themselves. `inner` provides its
    name.
    """

    def __init__(self, inner: AttentionBackend) -> None:
        self.name = inner.name
        self.graph_safe = False

    def refuses(self, spec: EntryInputsSpec, block_size: int, softcap: float, *, sinks: bool = False) -> str | None:
        """It serves every spec."""
        return None

    def prepare(self, batch: AttentionBatch, kv: LayerRows, layers: Collection[None]) -> AttentionBatch:
        """The batch itself: nothing is derived from it."""
        return batch


@dataclass(frozen=True, slots=True)
class JointCache:
    """View of rows and entries as K and V of one head in blocks of one token; `row_numbers` and `entry_numbers` give
    the index of a row or entry in it.

    All rows and entries begin at multiples of a common divisor, which is the distance between neighbouring blocks of
    this view. Most of its blocks begin in the middle of a real one and are never used.
    """

    kv: LayerKV  # the view
    page_stride: int  # in indices of the view, from a page to the next
    stride: int  # from a row to the next of a page, and from an entry
    first_row: int  # index of the first row of page 0
    first_entry: int

    @classmethod
    def of(cls, rows: torch.Tensor, entries: torch.Tensor) -> "JointCache":
        """The view of `rows` [num_blocks, block_size, size] and `entries` [num_blocks, num_entries, size].

        Raises:
            ConfigurationError: the KV cache is too large to number its rows.
        """
        assert rows.untyped_storage().data_ptr() == entries.untyped_storage().data_ptr(), "they share an arena"
        assert rows.stride() == entries.stride(), "pages and rows are of one size"
        num_blocks, _, size = rows.shape
        page, offsets = rows.stride(0), (rows.storage_offset(), entries.storage_offset())
        first = min(offsets)
        unit = math.gcd(page, size, max(offsets) - first)
        ends = (
            offset + (len_ - 1) * size for offset, len_ in zip(offsets, (rows.shape[1], entries.shape[1]), strict=True)
        )
        last = ((num_blocks - 1) * page + max(ends) - first) // unit
        if last > _MOST_NUMBER:
            raise ConfigurationError(
                f"{num_blocks} blocks are more than entries can be found in; give the KV cache at most "
                f"{num_blocks * _MOST_NUMBER // last} blocks"
            )
        blocks = rows.as_strided((last + 1, 1, 1, size), (unit, size, size, 1), first)
        starts = ((offset - first) // unit for offset in offsets)
        return cls(LayerKV(blocks, blocks), page // unit, size // unit, *starts)

    def row_numbers(self, pages: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Indices in this view of the rows at `offsets` of `pages`, all int64."""
        return pages * self.page_stride + offsets * self.stride + self.first_row

    def entry_numbers(self, pages: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Indices in this view of the entries at `offsets` of `pages`, all int64."""
        return pages * self.page_stride + offsets * self.stride + self.first_entry
