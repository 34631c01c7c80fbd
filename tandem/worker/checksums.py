"""CRC-32 (ISO-HDLC, as in zlib) of KV pages, compared by two workers to detect corrupted or incomplete transfers.

A block has one checksum for each rank of the reader: of that rank's pages. A source with another number of ranks
computes it from the parts of its own pages that such a page consists of.

Only pages that nothing writes are read: leased ones, and fetched ones before the engine may use them. A constant
(recurrent) state is always compared and must be finite: all tokens that follow depend on each of its numbers.
"""

import random
from collections.abc import Iterable, Sequence
from itertools import chain

from tandem.compute.arena import Arena, NumberSpan, constant_spans
from tandem.compute.page_bytes import LocalPageBytes, NumberParts, PageBytes
from tandem.compute.ranked_pages import RankedPages
from tandem.kvcache.ranked_layout import Parts

GroupBlock = tuple[int, tuple[int, ...]]  # KV group, pages of a block


class PageChecksums:
    """Computes checksums of one KV memory's pages, and samples the blocks of a read to compare.

    Args:
        share: share of a read's blocks to compare beside constant states, at least one block; 1 = all.
        pages: pages of all ranks; None = those of `arena`.
        found: reads the pages' bytes; None = all are in this process's memory.
    """

    def __init__(
        self,
        arena: Arena,
        share: float,
        seed: int = 0,
        pages: RankedPages | None = None,
        found: PageBytes | None = None,
    ) -> None:
        self._pages = pages or RankedPages.of(arena)
        self._bytes = found or LocalPageBytes(self._pages.pages)
        ranked = self._pages.ranked
        layouts = [ranked.layout_of(rank) for rank in range(ranked.num_ranks)]
        self._states = {
            group: [_by_place(constant_spans(layout, group)) for layout in layouts]
            for group, found in enumerate(ranked.layout.groups)
            if found.spec.is_constant
        }
        self._share = share
        self._random = random.Random(seed)

    def sample(self, groups: Sequence[int]) -> list[int]:
        """Indices of the blocks to compare, given the KV group of each block of a read."""
        states = {i for i, group in enumerate(groups) if group in self._states}
        others = [i for i in range(len(groups)) if i not in states]
        count = min(len(others), max(1, round(len(others) * self._share)))
        return sorted(states.union(self._random.sample(others, count)))

    def first_not_finite(self, blocks: Sequence[GroupBlock]) -> int | None:
        """Index of the first of these blocks with a constant state that has an infinite or NaN number; None = all are
        finite. Raises `TransportError` if pages of another host cannot be read.
        """
        wanted: list[NumberParts] = []
        positions: list[int] = []
        for position, (group, block) in enumerate(blocks):
            for rank, spans in enumerate(self._states.get(group, ())):
                for (start, end, dtype), places in spans.items():
                    wanted.append(NumberParts(rank, tuple(block[place] for place in places), start, end, dtype))
                    positions.append(position)
        found = self._bytes.are_finite(wanted) if wanted else []
        return next((position for position, finite in zip(positions, found, strict=True) if not finite), None)

    def arrived(self, blocks: Iterable[GroupBlock], source: Parts) -> list[int]:
        """Checksums of blocks that this worker has read: for each block one for each of our ranks. `source`: division
        of the source among ranks. Raises `TransportError` if pages of another host cannot be read.
        """
        return self._bytes.crc32s(
            list(chain.from_iterable(self._pages.parts_filled(*block, source) for block in blocks))
        )

    def as_read(self, blocks: Iterable[GroupBlock], reader: Parts) -> list[int]:
        """Checksums of blocks that a peer has read here: for each block one for each rank of the reader, divided as
        `reader`.
        """
        return self._bytes.crc32s(list(chain.from_iterable(self._pages.parts_read(*block, reader) for block in blocks)))


def _by_place(spans: Iterable[NumberSpan]) -> dict[tuple[int, int, str], list[int]]:
    """Groups spans with the same offsets and dtype: their pages by (start, end, dtype)."""
    found: dict[tuple[int, int, str], list[int]] = {}
    for span in spans:
        dtype = str(span.dtype).removeprefix("torch.")
        found.setdefault((span.start, span.end, dtype), []).append(span.page)
    return found
