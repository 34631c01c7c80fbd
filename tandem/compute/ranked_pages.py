"""The KV pages of all ranks of a worker, and their bytes as a reader with another number of ranks will have them."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from tandem.compute.arena import Arena
from tandem.kvcache.ranked_layout import Parts, RankedLayout

_Part = tuple[int, int, int]  # rank, start and end of bytes of its page


@dataclass(frozen=True)
class RankedPages:
    """`pages`: [num_ranks, num_blocks, page_bytes] uint8, of which this process may read and write all."""

    ranked: RankedLayout
    pages: torch.Tensor
    _parts: dict[tuple[int, Parts], list[list[_Part]]] = field(default_factory=dict, repr=False, compare=False)

    @staticmethod
    def of(arena: Arena) -> "RankedPages":
        """Those of one rank."""
        return RankedPages(RankedLayout(arena.layout, 1), arena.pages.unsqueeze(0))

    def own(self, group: int, block_id: int, source: Parts) -> Iterator[list[torch.Tensor]]:
        """For each of our ranks, what comes from a worker so divided: the page, or what is used of it."""
        is_whole = source == self.ranked.parts
        for rank in range(self.ranked.num_ranks):
            end = self.pages.shape[2] if is_whole else self.ranked.used_bytes(group, rank)
            yield [self.pages[rank, block_id, :end]]

    def as_read(self, group: int, block_id: int, reader: Parts) -> Iterator[list[torch.Tensor]]:
        """For each rank of a reader, the parts of our pages that its page will consist of, in order."""
        if reader == self.ranked.parts:
            return self.own(group, block_id, reader)
        parts = self._parts_of(group, reader)
        return ([self.pages[rank, block_id, start:end] for rank, start, end in each] for each in parts)

    def _parts_of(self, group: int, divided: Parts) -> list[list[_Part]]:
        found = self._parts.get((group, divided))
        if found is None:
            reader = RankedLayout(self.ranked.whole, *divided)
            placed: list[list[tuple[int, _Part]]] = [[] for _ in range(reader.num_ranks)]
            for each in reader.slices_from(self.ranked, group, range(1)):
                for copy in reader.copies_of(each, self.ranked, group):
                    part = each.source, copy.start, copy.start + copy.num_bytes
                    placed[each.destination].append((copy.to, part))
            found = [[part for _, part in sorted(parts)] for parts in placed]
            self._parts[group, divided] = found
        return found
