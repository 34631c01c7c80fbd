"""A record of what queries chose to attend to."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from tandem.compute.entries import EntriesBackend
from tandem.compute.sparse import NOT_CHOSEN, IndexedLatentBackend, IndexQueries, QueryBatch
from tandem.compute.step import Choices
from tandem.models.layers.block_attention import BlockAttention
from tandem.models.layers.compressed_attention import CompressedAttention
from tandem.models.layers.entry_attention import EntryAttention
from tandem.models.layers.sparse_latent_attention import SparseLatentAttention


@dataclass
class Record:
    """Positions that each query chose, by (indexer, position), of one request at a time. Of blocks: pairs of set and
    block, by (name of the query's map, position).

    A query that is computed again must choose the same.
    """

    by_query: dict[tuple[str, int], frozenset[Any]] = field(default_factory=dict)
    num_computed: int = 0

    def note(self, indexer: str, position: int, chosen: torch.Tensor) -> None:
        """`chosen`: [most], or [num_sets, most] of blocks."""
        rows = chosen[None] if chosen.dim() == 1 else chosen
        pairs = {(row, int(each)) for row, chosen in enumerate(rows) for each in chosen if each != NOT_CHOSEN}
        found = frozenset(each for _, each in pairs) if chosen.dim() == 1 else frozenset(pairs)
        assert self.by_query.setdefault((indexer, position), found) == found, (indexer, position)
        self.num_computed += 1


@contextmanager
def recorded(patch: pytest.MonkeyPatch) -> Iterator[Record]:
    """Records the positions that requests, one at a time, choose while inside."""
    record, plain = Record(), SparseLatentAttention.attend

    def attend(
        self: SparseLatentAttention,
        queries: tuple[torch.Tensor, ...],
        latents: Any,
        batch: QueryBatch,
        backend: IndexedLatentBackend,
        choices: Choices,
    ) -> torch.Tensor:
        before = set(choices)
        out = plain(self, queries, latents, batch, backend, choices)
        assert batch.num_requests == 1, "one request at a time"
        for indexer in choices.keys() - before:
            for position, row in zip(batch.positions.tolist(), choices[indexer], strict=True):
                record.note(indexer, position, row)
        return out

    with patch.context() as patched:
        patched.setattr(SparseLatentAttention, "attend", attend)
        yield record


@contextmanager
def recorded_blocks(patch: pytest.MonkeyPatch) -> Iterator[Record]:
    """As `recorded`, of blocks."""
    record, by_scores, by_weights = Record(), BlockAttention.choose, CompressedAttention.choose

    def note(name: str, batch: QueryBatch, chosen: torch.Tensor) -> None:
        assert batch.num_requests == 1, "one request at a time"
        for position, row in zip(batch.positions.tolist(), chosen, strict=True):
            record.note(name, position, row)

    def choose(self: BlockAttention, queries: torch.Tensor, kv: Any, batch: QueryBatch) -> torch.Tensor:
        chosen = by_scores(self, queries, kv, batch)
        note(self.name, batch, chosen)
        return chosen

    def choose_and_attend(
        self: CompressedAttention, queries: torch.Tensor, kv: Any, batch: QueryBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        found, chosen = by_weights(self, queries, kv, batch)
        note(self.name, batch, chosen)
        return found, chosen

    with patch.context() as patched:
        patched.setattr(BlockAttention, "choose", choose)
        patched.setattr(CompressedAttention, "choose", choose_and_attend)
        yield record


class _NotingChoices:
    """An `EntriesBackend` that records what it chooses for a layer."""

    def __init__(self, inner: EntriesBackend, name: str, record: Record) -> None:
        self._inner = inner
        self._name = name
        self._record = record

    def choose(self, index: IndexQueries, entries: Any, batch: QueryBatch, top_k: int) -> torch.Tensor:
        assert batch.num_requests == 1, "one request at a time"
        chosen = self._inner.choose(index, entries, batch, top_k)
        for position, row in zip(batch.positions.tolist(), chosen, strict=True):
            self._record.note(self._name, position, row)
        return chosen

    def attend(self, *args: Any) -> torch.Tensor:
        return self._inner.attend(*args)


@contextmanager
def recorded_entries(patch: pytest.MonkeyPatch) -> Iterator[Record]:
    """As `recorded`, of the entries of layers that choose them."""
    record, plain = Record(), EntryAttention.attend

    def attend(
        self: EntryAttention, queries: Any, states: Any, batches: Any, backends: tuple[Any, ...], choices: Choices
    ) -> torch.Tensor:
        noting: Any = _NotingChoices(backends[1], self.name, record)
        return plain(self, queries, states, batches, (backends[0], noting, *backends[2:]), choices)

    with patch.context() as patched:
        patched.setattr(EntryAttention, "attend", attend)
        yield record
