"""CRC-32 (ISO-HDLC, as in zlib) of KV pages, compared by two workers to detect corrupted or incomplete transfers.

There is one for each rank of the reader: of its page of a block. A source with another number of ranks computes it of
the parts that this page consists of.

Only pages that nothing writes are read: leased ones, and fetched ones before the engine may use them. A constant state
is always compared and must be finite: all tokens that follow depend on each of its numbers.
"""

import math
import random
import zlib
from collections.abc import Iterable, Sequence

import torch

from tandem.compute.arena import Arena, constant_planes
from tandem.compute.ranked_pages import RankedPages
from tandem.kvcache.ranked_layout import Parts

GroupBlock = tuple[int, int]  # KV group, block id


class PageChecksums:
    """Computes checksums of one KV memory's pages, and samples the blocks of a read to compare.

    Args:
        share: share of a read's blocks to compare beside constant states, at least one block; 1 = all.
        pages: of all ranks; None = of the arena's.
    """

    def __init__(self, arena: Arena, share: float, seed: int = 0, pages: RankedPages | None = None) -> None:
        self._pages = pages or RankedPages.of(arena)
        ranked = self._pages.ranked
        parts = [(ranked.layout_of(rank), pages) for rank, pages in enumerate(self._pages.pages)]
        planes = {
            group: tuple(plane for layout, pages in parts for plane in constant_planes(layout, pages, group))
            for group in range(len(ranked.layout.groups))
        }
        self._states = {group: found for group, found in planes.items() if found}
        self._share = share
        self._random = random.Random(seed)

    def sample(self, groups: Sequence[int]) -> list[int]:
        """Positions of the blocks to compare, of blocks of these KV groups."""
        states = {i for i, group in enumerate(groups) if group in self._states}
        others = [i for i in range(len(groups)) if i not in states]
        count = min(len(others), max(1, round(len(others) * self._share)))
        return sorted(states.union(self._random.sample(others, count)))

    def first_not_finite(self, blocks: Sequence[GroupBlock]) -> int | None:
        """Position of the first of these blocks with a constant state that has a number which is not finite."""
        for position, (group, block_id) in enumerate(blocks):
            for plane in self._states.get(group, ()):
                if not all(map(math.isfinite, torch.aminmax(plane[block_id]))):
                    return position
        return None

    def arrived(self, blocks: Iterable[GroupBlock], source: Parts) -> list[int]:
        """For each block one checksum for each of our ranks, as the reader of a worker so divided.

        Takes about a millisecond for each 2 MB and releases the interpreter lock.
        """
        return [_crc32(parts) for block in blocks for parts in self._pages.own(*block, source)]

    def as_read(self, blocks: Iterable[GroupBlock], reader: Parts) -> list[int]:
        """The same as the source, for each block one checksum for each of the reader's ranks."""
        return [_crc32(parts) for block in blocks for parts in self._pages.as_read(*block, reader)]


def _crc32(parts: Iterable[torch.Tensor]) -> int:
    value = 0
    for part in parts:
        value = zlib.crc32(part.cpu().numpy().data, value)
    return value
