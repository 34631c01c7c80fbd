"""The KV pages of all ranks of a worker, and their bytes as a reader with another number of ranks will have them."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from tandem.compute.arena import Arena
from tandem.kvcache.ranked_layout import RankedLayout

_Part = tuple[int, int, int]  # rank, start and end of bytes of its page


@dataclass(frozen=True)
class RankedPages:
    """`pages`: [num_ranks, num_blocks, page_bytes] uint8, of which this process may read and write all."""

    ranked: RankedLayout
    pages: torch.Tensor
    _parts: dict[tuple[int, int], list[list[_Part]]] = field(default_factory=dict, repr=False, compare=False)

    @staticmethod
    def of(arena: Arena) -> "RankedPages":
        """Those of one rank."""
        return RankedPages(RankedLayout(arena.layout, 1), arena.pages.unsqueeze(0))

    def own(self, group: int, block_id: int, source_ranks: int) -> Iterator[list[torch.Tensor]]:
        """For each of our ranks, what comes from a worker of so many: the page, or what is used of it."""
        end = self.ranked.used_bytes(group) if source_ranks != self.ranked.num_ranks else self.pages.shape[2]
        return ([self.pages[rank, block_id, :end]] for rank in range(self.ranked.num_ranks))

    def as_read(self, group: int, block_id: int, reader_ranks: int) -> Iterator[list[torch.Tensor]]:
        """For each rank of a reader, the parts of our pages that its page will consist of, in order."""
        if reader_ranks == self.ranked.num_ranks:
            return self.own(group, block_id, reader_ranks)
        parts = self._parts_of(group, reader_ranks)
        return ([self.pages[rank, block_id, start:end] for rank, start, end in each] for each in parts)

    def _parts_of(self, group: int, reader_ranks: int) -> list[list[_Part]]:
        found = self._parts.get((group, reader_ranks))
        if found is None:
            reader = RankedLayout(self.ranked.whole, reader_ranks)
            placed: list[list[tuple[int, _Part]]] = [[] for _ in range(reader_ranks)]
            for each in reader.slices_from(self.ranked, group, range(1)):
                for copy in reader.copies_of(each, self.ranked, group):
                    part = each.source, copy.start, copy.start + copy.num_bytes
                    placed[each.destination].append((copy.to, part))
            found = [[part for _, part in sorted(parts)] for parts in placed]
            self._parts[group, reader_ranks] = found
        return found
