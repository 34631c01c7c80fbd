"""A record of what queries chose to attend to."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch

from tandem.compute.arena import LayerIndexedLatents
from tandem.compute.sparse import NOT_CHOSEN, IndexQueries, QueryBatch


@dataclass
class Choices:
    """Positions that each query chose, by (the layer's place in a page, position), of one request at a time.

    A query that is computed again must choose the same.
    """

    by_query: dict[tuple[int, int], frozenset[int]] = field(default_factory=dict)
    num_computed: int = 0

    def note(self, layer: int, position: int, chosen: torch.Tensor) -> None:
        found = frozenset(int(each) for each in chosen if each != NOT_CHOSEN)
        assert self.by_query.setdefault((layer, position), found) == found, (layer, position)
        self.num_computed += 1

    def of_layer(self, number: int) -> dict[int, frozenset[int]]:
        """By position, of one of the layers that choose, in order."""
        place = sorted({layer for layer, _ in self.by_query})[number]
        return {position: found for (layer, position), found in self.by_query.items() if layer == place}


@contextmanager
def recorded(patch: pytest.MonkeyPatch, backend: type) -> Iterator[Choices]:
    """What one request at a time chooses by `backend` meanwhile, in models whose choosing layers are one KV group."""
    choices = Choices()
    plain = backend.choose  # type: ignore[attr-defined]

    def choose(
        self: object, index: IndexQueries, latents: LayerIndexedLatents, batch: QueryBatch, top_k: int
    ) -> torch.Tensor:
        chosen: torch.Tensor = plain(self, index, latents, batch, top_k)
        assert batch.num_requests == 1, "one request at a time"
        for position, row in zip(batch.positions.tolist(), chosen, strict=True):
            choices.note(latents.rows.storage_offset(), position, row)
        return chosen

    with patch.context() as patched:
        patched.setattr(backend, "choose", choose)
        yield choices
