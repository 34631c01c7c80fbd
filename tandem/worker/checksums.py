"""CRC-32 (ISO-HDLC, as in zlib) of whole KV pages, compared by two workers to detect corrupted or incomplete transfers.

Only pages that nothing writes are read: leased ones, and fetched ones before the engine may use them. A constant state
is always compared and must be finite: all tokens that follow depend on each of its numbers.
"""

import math
import random
import zlib
from collections.abc import Sequence

import torch

from tandem.compute.arena import Arena


class PageChecksums:
    """Computes checksums of one KV memory's pages, and samples the blocks of a read to compare.

    Args:
        share: share of a read's blocks to compare beside constant states, at least one block; 1 = all.
    """

    def __init__(self, arena: Arena, share: float, seed: int = 0) -> None:
        self._pages = arena.pages
        planes = {group: arena.constant_planes(group) for group in range(len(arena.layout.groups))}
        self._states = {group: found for group, found in planes.items() if found}
        self._share = share
        self._random = random.Random(seed)

    def sample(self, groups: Sequence[int]) -> list[int]:
        """Positions of the blocks to compare, of blocks of these KV groups."""
        states = {i for i, group in enumerate(groups) if group in self._states}
        others = [i for i in range(len(groups)) if i not in states]
        count = min(len(others), max(1, round(len(others) * self._share)))
        return sorted(states.union(self._random.sample(others, count)))

    def first_not_finite(self, blocks: Sequence[tuple[int, int]]) -> int | None:
        """Position of the first of these blocks, each (KV group, block id), with a constant state that has a number
        which is not finite.
        """
        for position, (group, block_id) in enumerate(blocks):
            for plane in self._states.get(group, ()):
                if not all(map(math.isfinite, torch.aminmax(plane[block_id]))):
                    return position
        return None

    def of(self, block_ids: Sequence[int]) -> list[int]:
        """One checksum for each block; takes about a millisecond for each 2 MB and releases the interpreter lock."""
        return [self._of_page(self._pages[block_id]) for block_id in block_ids]

    def _of_page(self, page: torch.Tensor) -> int:
        return zlib.crc32(page.cpu().numpy().data)
