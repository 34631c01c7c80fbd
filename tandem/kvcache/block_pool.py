"""Block pool: reference counts and eviction order of blocks.

Invariant: every block except the null block is in exactly one state. *Used*: referenced. *Kept*: unreferenced, but its
content is promised to stay available, so it is never evicted. *Cached*: unreferenced, but its content can be found by
hash until it is evicted, least recently used first. *Free*: none of these.
"""

import heapq
from collections import Counter, OrderedDict
from collections.abc import Iterable

from tandem.kvcache.prefix import NULL_BLOCK, PrefixCache


class BlockPool:
    """Allocates block ids 1 … `num_blocks`; id 0 is the null block, which has no owner.

    Free blocks are handed out lowest id first, so that a request's blocks tend to be neighbours and a transfer of them
    merges into few descriptors.

    Args:
        limited_groups: KV groups of which no more than `most_cached` blocks in total are cached: beyond that the least
            recently used one of them becomes free.
    """

    def __init__(
        self,
        num_blocks: int,
        cache: PrefixCache,
        limited_groups: frozenset[int] = frozenset(),
        most_cached: int = 0,
    ) -> None:
        self.num_blocks = num_blocks
        self._cache = cache
        self._references = [0] * (num_blocks + 1)
        self._free = list(range(1, num_blocks + 1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._limited_groups = limited_groups
        self._most_cached = most_cached
        self._limited: OrderedDict[int, None] = OrderedDict()  # those of `_cached` that are of a limited group
        self._promised: set[int] = set()
        self._num_used = 0
        self._num_kept = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return self._num_used

    @property
    def num_kept(self) -> int:
        return self._num_kept

    @property
    def num_available(self) -> int:
        """Number of blocks that `allocate` could return now."""
        return len(self._free) + len(self._cached)

    def num_idle(self, block_ids: Iterable[int]) -> int:
        """Number of these blocks that `acquire` would remove from `num_available`."""
        return sum(map(self._cached.__contains__, block_ids))

    def is_wanted(self, block_id: int) -> bool:
        """Whether more than one owner references the block, or it is to be kept."""
        return self._references[block_id] > 1 or block_id in self._promised

    def is_used(self, block_id: int) -> bool:
        """Whether the block is referenced."""
        return self._references[block_id] > 0

    def keep(self, block_id: int) -> None:
        """Protect a block in the prefix cache from eviction until `let_go`; an idle one leaves `num_available`."""
        assert self._cache.holds(block_id), f"block {block_id} holds nothing that could be kept"
        assert block_id not in self._promised, f"block {block_id} is kept already"
        self._promised.add(block_id)
        if block_id in self._cached:
            self._uncache(block_id)
            self._num_kept += 1

    def let_go(self, block_id: int) -> None:
        """Undo `keep`. An unreferenced block is evicted next, since it is not needed any more or has a copy."""
        self._promised.remove(block_id)
        if self._references[block_id] == 0:
            self._num_kept -= 1
            self._put_in_cache(block_id)
            self._cached.move_to_end(block_id, last=False)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks with one reference each, evicting cached ones when no free one is left.

        The caller checks `num_available` first.
        """
        assert count <= self.num_available, f"{count} blocks asked of {self.num_available}"
        blocks = [self._take() for _ in range(count)]
        self._num_used += count
        return blocks

    def acquire(self, block_ids: Iterable[int]) -> None:
        """Add a reference to blocks found in the prefix cache. NOTE: of a long prompt there are thousands."""
        references, promised, cached, limited = self._references, self._promised, self._cached, self._limited
        for block_id in block_ids:
            if block_id == NULL_BLOCK:
                continue
            if references[block_id] == 0:
                self._num_used += 1
                if block_id in promised:
                    self._num_kept -= 1
                else:
                    del cached[block_id]
                    if limited:
                        limited.pop(block_id, None)
            references[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Drop one reference from each block. Blocks given first are evicted first: pass the end of a chain first."""
        for block_id in block_ids:
            if block_id == NULL_BLOCK:
                continue
            assert self._references[block_id] > 0, f"block {block_id} was released too often"
            self._references[block_id] -= 1
            if self._references[block_id] == 0:
                self._num_used -= 1
                self._retire(block_id)

    def check(self, expected: Counter[int]) -> None:
        """Check the module's invariant, given the number of references that owners hold on each block.

        Raises:
            AssertionError: naming the first block or count that is wrong.
        """
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a block is free twice"
        assert len(self._limited) <= max(0, self._most_cached), "more states are cached than may be"
        assert set(self._limited) <= cached, "a block is limited that is not cached"
        assert not free & cached, f"blocks {free & cached} are both free and cached"
        num_known = self.num_free + self.num_cached + self.num_used + self.num_kept
        assert num_known == self.num_blocks, "free + cached + used + kept != total"
        kept = {block_id for block_id in self._promised if not self._references[block_id]}
        assert len(kept) == self.num_kept, f"{self.num_kept} blocks are counted as kept; {len(kept)} are"
        assert not self._promised & (free | cached), "a kept block can be handed out"
        for block_id in range(1, self.num_blocks + 1):
            references = self._references[block_id]
            assert references == expected[block_id], (
                f"block {block_id} counts {references} references; its owners hold {expected[block_id]}"
            )
            assert block_id not in self._promised or self._cache.holds(block_id), (
                f"kept block {block_id} is not findable"
            )
            idle = block_id in free or block_id in cached or block_id in kept
            assert idle == (references == 0), f"block {block_id} with {references} references, idle={idle}"
            assert block_id not in free or not self._cache.holds(block_id), f"free block {block_id} is findable"
            assert block_id not in cached or self._cache.holds(block_id), f"cached block {block_id} is not findable"

    def _take(self) -> int:
        if self._free:
            block_id = heapq.heappop(self._free)
        else:
            block_id, _ = self._cached.popitem(last=False)
            self._limited.pop(block_id, None)
            self._cache.discard(block_id)
        self._references[block_id] = 1
        return block_id

    def _retire(self, block_id: int) -> None:
        if block_id in self._promised:
            self._num_kept += 1
        elif self._cache.holds(block_id):
            self._put_in_cache(block_id)
        else:
            heapq.heappush(self._free, block_id)

    def _put_in_cache(self, block_id: int) -> None:
        self._cached[block_id] = None
        if self._limited_groups and self._cache.group_of(block_id) in self._limited_groups:
            self._limited[block_id] = None
            while len(self._limited) > self._most_cached:
                oldest = next(iter(self._limited))
                self._uncache(oldest)
                self._cache.discard(oldest)
                heapq.heappush(self._free, oldest)

    def _uncache(self, block_id: int) -> None:
        del self._cached[block_id]
        self._limited.pop(block_id, None)
