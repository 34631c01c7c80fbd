"""KV pages of all ranks of a worker, and their bytes that a transfer to or from another number of ranks involves.

A division (`Parts`) is the number of ranks of a worker and its stages. Ranks that share their pages count as one. The
byte ranges are used for checksums. Pages may also store other data, such as a drafter's state: their group is `OPAQUE`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from tandem.compute.arena import Arena
from tandem.compute.page_bytes import PagePart
from tandem.kvcache.ranked_layout import Parts, RankedLayout

OPAQUE = -1
"""In place of a KV group: whole pages whose bytes mean something to those who named them. They move between workers of
equal ranks and stages only."""

_Part = tuple[int, int, int, int]  # as a `PagePart`, with the page's place in its block


@dataclass(frozen=True)
class RankedPages:
    """KV pages of all ranks. `pages`: [num_parts, num_pages, page_bytes] uint8, a part for each of the layout's
    `num_ranks`, all readable and writable by this process. Parts of ranks on other hosts are empty here.
    """

    ranked: RankedLayout
    pages: torch.Tensor
    _parts: dict[tuple[int, Parts], list[list[_Part]]] = field(default_factory=dict, repr=False, compare=False)

    @staticmethod
    def of(arena: Arena) -> "RankedPages":
        """The pages of a worker with a single rank."""
        return RankedPages(RankedLayout(arena.layout, 1), arena.pages.unsqueeze(0))

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page number on all ranks together."""
        return self.pages.shape[0] * self.pages.shape[2]

    def store(self, page_ids: Sequence[int], data: torch.Tensor) -> None:
        """Copies `data` that is no KV, uint8 [num_bytes], into these pages of all ranks, which must have room; returns
        when the copy is done.
        """
        padding = len(page_ids) * self.bytes_per_page - data.numel()
        whole = torch.nn.functional.pad(data.to(self.pages.device), (0, padding))
        self.pages[:, list(page_ids)] = whole.view(len(page_ids), self.pages.shape[0], -1).transpose(0, 1)
        self._await_copies()

    def load(self, page_ids: Sequence[int], num_bytes: int) -> torch.Tensor:
        """A copy of the data that `store` wrote: uint8 [num_bytes]. On return the pages may be overwritten."""
        found = self.pages[:, list(page_ids)].transpose(0, 1).reshape(-1)[:num_bytes]
        self._await_copies()
        return found

    def _await_copies(self) -> None:
        if self.pages.is_cuda:
            torch.cuda.current_stream(self.pages.device).synchronize()

    def parts_filled(self, group: int, block: Sequence[int], source: Parts) -> Iterator[list[PagePart]]:
        """For each of this worker's ranks, the parts of a block's pages that a transfer from a source with the division
        `source` fills: whole pages, or their used bytes. `block`: numbers of its pages. `group`: KV group, or `OPAQUE`.
        """
        is_whole = source == self.ranked.parts or group == OPAQUE
        whole = (self.pages.shape[2],) * len(block)
        for rank in range(self.ranked.num_ranks):
            ends = whole if is_whole else self.ranked.used_bytes(group, rank)
            yield [(rank, page, 0, end) for page, end in zip(block, ends, strict=True)]

    def parts_read(self, group: int, block: Sequence[int], reader: Parts) -> Iterator[list[PagePart]]:
        """For each rank of a reader with the division `reader`, the parts of this worker's block that make up its
        block, in order.
        """
        if reader == self.ranked.parts or group == OPAQUE:
            return self.parts_filled(group, block, reader)
        parts = self._parts_of(group, reader)
        return ([(rank, block[page], start, end) for rank, page, start, end in each] for each in parts)

    def _parts_of(self, group: int, divided: Parts) -> list[list[_Part]]:
        found = self._parts.get((group, divided))
        if found is None:
            reader = RankedLayout(self.ranked.whole, *divided)
            placed: list[list[tuple[int, int, _Part]]] = [[] for _ in range(reader.num_ranks)]
            for each in reader.slices_from(self.ranked, group, range(1)):
                for copy in reader.copies_of(each, self.ranked, group):
                    part = each.source, copy.start.page, copy.start.start, copy.start.start + copy.num_bytes
                    placed[each.destination].append((copy.to.page, copy.to.start, part))
            found = [[part for _, _, part in sorted(parts)] for parts in placed]
            self._parts[group, divided] = found
        return found
