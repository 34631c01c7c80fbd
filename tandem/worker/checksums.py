"""CRC-32 (ISO-HDLC, as in zlib) of KV pages, compared by two workers to detect corrupted or incomplete transfers.

There is one for each rank of the reader: of its pages of a block. A source with another number of ranks computes it of
the parts that this page consists of.

Only pages that nothing writes are read: leased ones, and fetched ones before the engine may use them. A constant state
is always compared and must be finite: all tokens that follow depend on each of its numbers.
"""

import math
import random
import zlib
from collections.abc import Iterable, Iterator, Sequence

import torch

from tandem.compute.arena import Arena, NumberSpan, constant_spans
from tandem.compute.ranked_pages import RankedPages
from tandem.kvcache.ranked_layout import Parts

GroupBlock = tuple[int, tuple[int, ...]]  # KV group, pages of a block
_AT_ONCE = 64  # pages, whose copies take little memory


class PageChecksums:
    """Computes checksums of one KV memory's pages, and samples the blocks of a read to compare.

    Args:
        share: share of a read's blocks to compare beside constant states, at least one block; 1 = all.
        pages: of all ranks; None = of the arena's.
    """

    def __init__(self, arena: Arena, share: float, seed: int = 0, pages: RankedPages | None = None) -> None:
        self._pages = pages or RankedPages.of(arena)
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
        """Positions of the blocks to compare, of blocks of these KV groups."""
        states = {i for i, group in enumerate(groups) if group in self._states}
        others = [i for i in range(len(groups)) if i not in states]
        count = min(len(others), max(1, round(len(others) * self._share)))
        return sorted(states.union(self._random.sample(others, count)))

    def first_not_finite(self, blocks: Sequence[GroupBlock]) -> int | None:
        """Position of the first of these blocks with a constant state that has a number which is not finite."""
        for position, (group, block) in enumerate(blocks):
            for rank, spans in enumerate(self._states.get(group, ())):
                for span, numbers in spans.items():
                    parts = ([block[page] for page in part] for part in _parts(numbers))
                    if not all(self._are_finite(rank, span, part) for part in parts):
                        return position
        return None

    def _are_finite(self, rank: int, span: tuple[int, int, torch.dtype], pages: list[int]) -> bool:
        start, end, dtype = span
        numbers = self._pages.pages[rank][pages, start:end].view(dtype)
        return all(math.isfinite(bound) for bound in torch.aminmax(numbers))

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


def _by_place(spans: Iterable[NumberSpan]) -> dict[tuple[int, int, torch.dtype], list[int]]:
    """The pages of a block that have numbers of one dtype at the same place."""
    found: dict[tuple[int, int, torch.dtype], list[int]] = {}
    for span in spans:
        found.setdefault((span.start, span.end, span.dtype), []).append(span.page)
    return found


def _parts(pages: Sequence[int]) -> Iterator[Sequence[int]]:
    return (pages[start : start + _AT_ONCE] for start in range(0, len(pages), _AT_ONCE))
