"""CRC-32 (ISO-HDLC, as in zlib) of whole pages of the arena: what two workers compare to know that bytes arrived whole.

Reads pages that nobody writes: leased ones, and fetched ones before the engine knows of them.
"""

import random
import zlib
from collections.abc import Sequence

import torch

from tandem.compute.arena import Arena


class PageChecksums:
    """Checksums of one arena's pages, and which of a read's blocks to compare.

    Args:
        share: of the blocks of a read, at least one; 1 = all.
    """

    def __init__(self, arena: Arena, share: float, seed: int = 0) -> None:
        self._pages = arena.pages
        self._share = share
        self._random = random.Random(seed)

    def sample(self, count: int) -> list[int]:
        """Which of `count` blocks to compare, as positions."""
        if count == 0:
            return []
        return sorted(self._random.sample(range(count), min(count, max(1, round(count * self._share)))))

    def of(self, block_ids: Sequence[int]) -> list[int]:
        """One checksum a block; takes about a millisecond for each 2 MB and lets other threads run."""
        return [self._of_page(self._pages[block_id]) for block_id in block_ids]

    def _of_page(self, page: torch.Tensor) -> int:
        return zlib.crc32(page.cpu().numpy().data)
