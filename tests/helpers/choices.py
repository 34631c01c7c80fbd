"""A record of what queries chose to attend to."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from tandem.compute.sparse import NOT_CHOSEN, IndexedLatentBackend, QueryBatch
from tandem.compute.step import Choices
from tandem.models.layers.sparse_latent_attention import SparseLatentAttention


@dataclass
class Record:
    """Positions that each query chose, by (indexer, position), of one request at a time.

    A query that is computed again must choose the same.
    """

    by_query: dict[tuple[str, int], frozenset[int]] = field(default_factory=dict)
    num_computed: int = 0

    def note(self, indexer: str, position: int, chosen: torch.Tensor) -> None:
        found = frozenset(int(each) for each in chosen if each != NOT_CHOSEN)
        assert self.by_query.setdefault((indexer, position), found) == found, (indexer, position)
        self.num_computed += 1


@contextmanager
def recorded(patch: pytest.MonkeyPatch) -> Iterator[Record]:
    """What requests, one at a time, choose meanwhile."""
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
