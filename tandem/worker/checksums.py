"""CRC-32 (ISO-HDLC, as in zlib) of whole KV pages, compared by two workers to detect corrupted or incomplete transfers.

Only pages that nothing writes are read: leased ones, and fetched ones before the engine may use them.
"""

import random
import zlib
from collections.abc import Sequence

import torch

from tandem.compute.arena import Arena


class PageChecksums:
    """Computes checksums of one KV memory's pages, and samples the blocks of a read to compare.

    Args:
        share: share of a read's blocks to compare, at least one block; 1 = all.
    """

    def __init__(self, arena: Arena, share: float, seed: int = 0) -> None:
        self._pages = arena.pages
        self._share = share
        self._random = random.Random(seed)

    def sample(self, count: int) -> list[int]:
        """Positions of the blocks to compare, of `count` blocks."""
        if count == 0:
            return []
        return sorted(self._random.sample(range(count), min(count, max(1, round(count * self._share)))))

    def of(self, block_ids: Sequence[int]) -> list[int]:
        """One checksum for each block; takes about a millisecond for each 2 MB and releases the interpreter lock."""
        return [self._of_page(self._pages[block_id]) for block_id in block_ids]

    def _of_page(self, page: torch.Tensor) -> int:
        return zlib.crc32(page.cpu().numpy().data)
