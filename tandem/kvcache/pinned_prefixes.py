"""Pinned prefixes: keeps the blocks that every KV group needs to serve a prefix, in the pool or the host tier.

Invariant: a request that begins with a granted prefix finds it in the pool or the host tier until its deadline. Decides
how much can be granted; `promised_blocks` does the accounting.
"""

import math
from array import array
from collections.abc import Callable, Sequence

from tandem.kvcache.block_pool import BlockPool
from tandem.kvcache.block_table import BlockRange
from tandem.kvcache.prefix import NULL_BLOCK, PrefixCache, PrefixMatch, longest_prefix
from tandem.kvcache.promised_blocks import PromisedBlocks
from tandem.kvcache.spec import KVLayout
from tandem.kvcache.tiers import BlockKey, HostRead


class PinnedPrefixes:
    """Pinned prefixes of one pool's `blocks`.

    Args:
        num_unpromised: number of pages of the pool that are not promised to an owner.
    """

    def __init__(
        self,
        layout: KVLayout,
        pool: BlockPool,
        cache: PrefixCache,
        blocks: PromisedBlocks,
        num_unpromised: Callable[[], int],
    ) -> None:
        self.blocks = blocks
        self._layout = layout
        self._pool = pool
        self._cache = cache
        self._num_unpromised = num_unpromised
        self._most_pages = sum(group.pages_per_block for group in layout.groups)  # of one index of a table
        self._now_s = 0.0

    def tell_time(self, now_s: float) -> None:
        """Set the current time: promises whose deadline has passed end, and new ones count from it."""
        self._now_s = now_s
        self.blocks.expire(now_s)

    def pin(self, hashes: Sequence[bytes], ttl_s: float) -> int:
        """Keep the longest cached prefix of this chain for `ttl_s` seconds; returns its number of blocks.

        Grants fewer if there is not enough space. Extends existing promises.
        """
        num_blocks = len(hashes)
        while num_blocks > 0:
            match = longest_prefix(self._cache, self._layout, hashes, num_blocks)
            blocks = _blocks_of(match, hashes)
            num_new = self._pool.num_pages(block_id for key, block_id in blocks if key not in self.blocks)
            num_idle = self._pool.num_idle(block_id for _, block_id in blocks)
            excess = max(num_new - self.blocks.room, num_idle - self._num_unpromised())
            if excess <= 0:
                self.blocks.pin(blocks, self._now_s + ttl_s)
                return match.num_blocks
            num_blocks = match.num_blocks - math.ceil(excess / self._most_pages)
        return 0

    def num_restorable(self, hashes: Sequence[bytes]) -> int:
        """Number of leading blocks of a chain that both tiers hold together; 0 if the pool alone holds as many."""
        both = longest_prefix(self, self._layout, hashes, len(hashes)).num_blocks
        return both if both > longest_prefix(self._cache, self._layout, hashes, len(hashes)).num_blocks else 0

    def lookup(self, block_hash: bytes, group: int) -> int | None:
        """`BlockLookup` over both tiers; the returned number only means that one of them holds the content."""
        block_id = self._cache.lookup(block_hash, group)
        if block_id is not None:
            return block_id
        slots = self.blocks.slots_of((group, block_hash))
        return slots[0] + 1 if slots else None

    def leading(self, hashes: Sequence[bytes], group: int, first: int, end: int) -> "array[int]":
        """`lookup` of a chain's blocks `[first, end)`, up to the first content that neither tier holds."""
        found = (self.lookup(block_hash, group) for block_hash in hashes[first:end])
        return array("i", iter(lambda: next(found, None), None))

    def begin_restore(self, hashes: Sequence[bytes], groups: Sequence[BlockRange]) -> tuple[HostRead, ...]:
        """Returns the copies that fill reserved blocks from both tiers; protects sources until `blocks.end_reads`."""
        found = [
            self._begin_read(group, index, pages, hashes[index])
            for group, reserved in enumerate(groups)
            for index, pages in enumerate(reserved.pages(), reserved.first_index)
            if index < len(hashes)
        ]
        return tuple(read for read in found if read is not None)

    def _begin_read(self, group: int, index: int, pages: tuple[int, ...], block_hash: bytes) -> HostRead | None:
        slots = self.blocks.begin_read((group, block_hash))
        if slots:
            return HostRead(group, index, pages, slots)
        source_id = self._cache.lookup(block_hash, group)
        if source_id is None or self._pool.num_idle([source_id]) > self._num_unpromised():
            return None
        self.blocks.begin_block_read(source_id)
        return HostRead(group, index, pages, (), source_id, self._pool.pages_of(source_id))


def _blocks_of(match: PrefixMatch, hashes: Sequence[bytes]) -> list[tuple[BlockKey, int]]:
    """Returns (content, block id) of the match's blocks, in the order of the chain."""
    return [
        ((group, hashes[index]), block_ids[index])
        for index in range(match.num_blocks)
        for group, block_ids in enumerate(match.block_ids)
        if block_ids[index] != NULL_BLOCK
    ]
