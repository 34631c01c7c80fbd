"""Promises about whole prefixes: what every KV group needs to serve one, and which tier has it.

Invariant: what is granted of a prefix can be found by a request that begins with it, in the pool or the host tier,
until its time is over. Decides about room; `kept_blocks` keeps the accounts.
"""

import math
from collections.abc import Callable, Sequence

from tandem.kvcache.block_pool import BlockPool
from tandem.kvcache.block_table import BlockRange
from tandem.kvcache.kept_blocks import KeptBlocks
from tandem.kvcache.prefix import NULL_BLOCK, PrefixCache, PrefixMatch, longest_prefix
from tandem.kvcache.spec import KVLayout
from tandem.kvcache.tiers import BlockKey, HostRead


class KeptPrefixes:
    """Prefixes over one pool's `blocks`.

    Args:
        num_unpromised: blocks of the pool that nobody counts on.
    """

    def __init__(
        self,
        layout: KVLayout,
        pool: BlockPool,
        cache: PrefixCache,
        blocks: KeptBlocks,
        num_unpromised: Callable[[], int],
    ) -> None:
        self.blocks = blocks
        self._layout = layout
        self._pool = pool
        self._cache = cache
        self._num_unpromised = num_unpromised
        self._now_s = 0.0

    def tell_time(self, now_s: float) -> None:
        """Promises are over by this time, and those that are given before the next call count from it."""
        self._now_s = now_s
        self.blocks.expire(now_s)

    def pin(self, hashes: Sequence[bytes], ttl_s: float) -> int:
        """Promise for `ttl_s` seconds that the prefix of this chain which can be found now is found; returns its number
        of blocks. Fewer than were found when there is no room for more. Renews what is promised already.
        """
        num_blocks = len(hashes)
        while num_blocks > 0:
            match = longest_prefix(self._cache, self._layout, hashes, num_blocks)
            blocks = _blocks_of(match, hashes)
            num_new = sum(key not in self.blocks for key, _ in blocks)
            num_idle = self._pool.num_idle(block_id for _, block_id in blocks)
            excess = max(num_new - self.blocks.room, num_idle - self._num_unpromised())
            if excess <= 0:
                self.blocks.keep(blocks, self._now_s + ttl_s)
                return match.num_blocks
            num_blocks = match.num_blocks - math.ceil(excess / len(self._layout.groups))
        return 0

    def num_restorable(self, hashes: Sequence[bytes]) -> int:
        """How many leading blocks of a chain both tiers hold together; 0 when the pool holds as many."""
        both = longest_prefix(self, self._layout, hashes, len(hashes)).num_blocks
        return both if both > longest_prefix(self._cache, self._layout, hashes, len(hashes)).num_blocks else 0

    def lookup(self, block_hash: bytes, group: int) -> int | None:
        """A `BlockLookup` over both tiers; the answer only says that one of them has it."""
        block_id = self._cache.lookup(block_hash, group)
        if block_id is not None:
            return block_id
        slot = self.blocks.slot_of((group, block_hash))
        return None if slot is None else slot + 1

    def begin_restore(self, hashes: Sequence[bytes], groups: Sequence[BlockRange]) -> tuple[HostRead, ...]:
        """What both tiers have of reserved blocks. It stays where it is until `blocks.end_reads`."""
        found = [
            self._begin_read(group, index, block_id, hashes[index])
            for group, reserved in enumerate(groups)
            for index, block_id in enumerate(reserved.block_ids, reserved.first_index)
            if index < len(hashes)
        ]
        return tuple(read for read in found if read is not None)

    def _begin_read(self, group: int, index: int, block_id: int, block_hash: bytes) -> HostRead | None:
        slot = self.blocks.begin_read((group, block_hash))
        if slot is not None:
            return HostRead(group, index, block_id, slot)
        source_id = self._cache.lookup(block_hash, group)
        if source_id is None or self._pool.num_idle([source_id]) > self._num_unpromised():
            return None
        self.blocks.begin_block_read(source_id)
        return HostRead(group, index, block_id, None, source_id)


def _blocks_of(match: PrefixMatch, hashes: Sequence[bytes]) -> list[tuple[BlockKey, int]]:
    """Its blocks in the order of the chain, by content."""
    return [
        ((group, hashes[index]), block_ids[index])
        for index in range(match.num_blocks)
        for group, block_ids in enumerate(match.block_ids)
        if block_ids[index] != NULL_BLOCK
    ]
