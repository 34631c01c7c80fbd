"""Block pool: the pages of blocks, reference counts and eviction order.

A block is one page or several, not necessarily neighbours. Its id is that of its first page, and all numbers of blocks
that the pool gives or takes are numbers of pages, so that blocks of any size share it. What is done to a block costs
the same however many pages it has.

Invariant: every block except the null block is in exactly one state. *Used*: referenced. *Pinned*: unreferenced, but
its content is promised to stay available, so it is never evicted. *Cached*: unreferenced, but its content can be found
by hash until it is evicted, least recently used first. *Free*: none of these.
"""

import heapq
from collections import Counter, OrderedDict
from collections.abc import Iterable
from functools import partial

from tandem.kvcache.prefix import NULL_BLOCK, PrefixCache


class BlockPool:
    """Allocates pages 1 … `num_blocks`; id 0 is the null block, which has no owner.

    Free pages are handed out lowest id first, so that a request's blocks tend to be neighbours and a transfer of them
    merges into few descriptors. Those of a freed block of several stay together for the next one of as many, until
    others need them.

    Args:
        limited_groups: KV groups of which no more than `most_cached` pages in total are cached: beyond that the least
            recently used block of them becomes free.
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
        self._pages: dict[int, tuple[int, ...]] = {}  # of blocks of several, by id
        self._spare: dict[int, list[tuple[int, ...]]] = {}  # free pages of such blocks, by their number
        self._num_spare = 0
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._limited_groups = limited_groups
        self._most_cached = most_cached
        self._limited: OrderedDict[int, None] = OrderedDict()  # those of `_cached` that are of a limited group
        self._pinned: set[int] = set()
        self._num_used = 0
        self._num_pinned = 0
        self._num_cached = 0
        self._num_limited = 0

    @property
    def num_free(self) -> int:
        return len(self._free) + self._num_spare

    @property
    def num_cached(self) -> int:
        return self._num_cached

    @property
    def num_used(self) -> int:
        return self._num_used

    @property
    def num_pinned(self) -> int:
        return self._num_pinned

    @property
    def num_available(self) -> int:
        """Number of pages that `allocate` could take now."""
        return len(self._free) + self._num_spare + self._num_cached

    def num_idle(self, block_ids: Iterable[int]) -> int:
        """Number of pages of these blocks that `acquire` would remove from `num_available`."""
        return self.num_pages(filter(self._cached.__contains__, block_ids))

    def num_pages(self, block_ids: Iterable[int]) -> int:
        """Of these blocks together."""
        if not self._pages:
            return sum(1 for _ in block_ids)
        return sum(map(self._size, block_ids))

    def pages_of(self, block_id: int) -> tuple[int, ...]:
        """The pages of a block in use, its own id first."""
        return self._pages.get(block_id) or (block_id,)

    def is_wanted(self, block_id: int) -> bool:
        """Whether more than one owner references the block, or it is pinned."""
        return self._references[block_id] > 1 or block_id in self._pinned

    def is_used(self, block_id: int) -> bool:
        """Whether the block is referenced."""
        return self._references[block_id] > 0

    def pin(self, block_id: int) -> None:
        """Protect a block in the prefix cache from eviction until `unpin`; an idle one leaves `num_available`."""
        assert self._cache.holds(block_id), f"block {block_id} holds nothing that could be pinned"
        assert block_id not in self._pinned, f"block {block_id} is pinned already"
        self._pinned.add(block_id)
        if block_id in self._cached:
            self._uncache(block_id)
            self._num_pinned += self._size(block_id)

    def unpin(self, block_id: int) -> None:
        """Undo `pin`. An unreferenced block is evicted next, since it is not needed any more or has a copy."""
        self._pinned.remove(block_id)
        if self._references[block_id] == 0:
            self._num_pinned -= self._size(block_id)
            self._put_in_cache(block_id)
            self._cached.move_to_end(block_id, last=False)

    def allocate(self, count: int, pages_per_block: int = 1) -> list[int]:
        """Take `count` blocks with one reference each, evicting cached ones when no free page is left.

        The caller checks `num_available` first.
        """
        num_pages = count * pages_per_block
        assert num_pages <= self.num_available, f"{num_pages} blocks asked of {self.num_available}"
        take = self._take_page if pages_per_block == 1 else partial(self._take_several, pages_per_block)
        blocks = [take() for _ in range(count)]
        for block_id in blocks:
            self._references[block_id] = 1
        self._num_used += num_pages
        return blocks

    def acquire(self, block_ids: Iterable[int]) -> None:
        """Add a reference to blocks found in the prefix cache. NOTE: of a long prompt there are thousands."""
        references, pinned, cached = self._references, self._pinned, self._cached
        pages, limited = self._pages, self._limited
        for block_id in block_ids:
            if block_id == NULL_BLOCK:
                continue
            if references[block_id] == 0:
                size = len(pages[block_id]) if block_id in pages else 1
                self._num_used += size
                if block_id in pinned:
                    self._num_pinned -= size
                else:
                    del cached[block_id]
                    self._num_cached -= size
                    if block_id in limited:
                        del limited[block_id]
                        self._num_limited -= size
            references[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Drop one reference from each block. Blocks given first are evicted first: pass the end of a chain first.

        NOTE: of a long prompt there are thousands.
        """
        references, pinned, cached, pages = self._references, self._pinned, self._cached, self._pages
        holds, has_limit = self._cache.holds, bool(self._limited_groups)
        for block_id in block_ids:
            if block_id == NULL_BLOCK:
                continue
            count = references[block_id]
            assert count > 0, f"block {block_id} was released too often"
            references[block_id] = count - 1
            if count > 1:
                continue
            size = len(pages[block_id]) if block_id in pages else 1
            self._num_used -= size
            if block_id in pinned:
                self._num_pinned += size
            elif not holds(block_id):
                self._free_block(block_id)
            elif has_limit:
                self._put_in_cache(block_id)
            else:
                cached[block_id] = None
                self._num_cached += size

    def check(self, expected: Counter[int]) -> None:
        """Check the module's invariant, given the number of references that owners hold on each block.

        Raises:
            AssertionError: naming the first block or count that is wrong.
        """
        singles, cached = set(self._free), set(self._cached)
        spare = [pages for several in self._spare.values() for pages in several]
        assert len(singles) == len(self._free), "a block is free twice"
        assert self._num_spare == sum(map(len, spare)), "pages of freed blocks are miscounted"
        others = Counter(page for pages in (*spare, *self._pages.values()) for page in pages)
        assert set(others.values()) <= {1}, "a page belongs to two blocks"
        assert not singles & set(others), "a page is free and belongs to a block"
        followers = {page for block_id, pages in self._pages.items() for page in pages if page != block_id}
        free = singles.union(*spare)
        assert self.num_pages(self._limited) == self._num_limited <= max(0, self._most_cached), "too many states cached"
        assert set(self._limited) <= cached, "a block is limited that is not cached"
        assert self.num_pages(cached) == self._num_cached, "cached blocks are miscounted"
        assert not free & cached, f"blocks {free & cached} are both free and cached"
        num_known = self.num_free + self.num_cached + self.num_used + self.num_pinned
        assert num_known == self.num_blocks, "free + cached + used + pinned != total"
        pinned = {block_id for block_id in self._pinned if not self._references[block_id]}
        num_pinned = self.num_pages(pinned)
        assert num_pinned == self.num_pinned, f"{self.num_pinned} blocks are counted as pinned; {num_pinned} are"
        assert not self._pinned & (free | cached), "a pinned block can be handed out"
        for block_id in range(1, self.num_blocks + 1):
            references = self._references[block_id]
            assert references == expected[block_id], (
                f"block {block_id} counts {references} references; its owners hold {expected[block_id]}"
            )
            if block_id in followers:
                assert not references, f"page {block_id} of another block is referenced itself"
                continue
            assert block_id not in self._pinned or self._cache.holds(block_id), (
                f"pinned block {block_id} is not findable"
            )
            idle = block_id in free or block_id in cached or block_id in pinned
            assert idle == (references == 0), f"block {block_id} with {references} references, idle={idle}"
            assert block_id not in free or not self._cache.holds(block_id), f"free block {block_id} is findable"
            assert block_id not in cached or self._cache.holds(block_id), f"cached block {block_id} is not findable"

    def _size(self, block_id: int) -> int:
        pages = self._pages.get(block_id)
        return 1 if pages is None else len(pages)

    def _take_page(self) -> int:
        while not self._free:
            self._free_pages()
        return heapq.heappop(self._free)

    def _take_several(self, count: int) -> int:
        spare = self._spare.get(count)
        while not spare and len(self._free) < count:
            self._free_pages()
            spare = self._spare.get(count)
        if spare:
            pages = spare.pop()
            self._num_spare -= count
        else:
            pages = tuple(heapq.heappop(self._free) for _ in range(count))
        self._pages[pages[0]] = pages
        return pages[0]

    def _free_pages(self) -> None:
        """Let any block take some page that is free in a group of others; where there is none, evict a block."""
        several = next((spare for spare in self._spare.values() if spare), None)
        if several is None:
            block_id, _ = self._cached.popitem(last=False)
            self._forget_cached(block_id)
            self._cache.discard(block_id)
            self._free_block(block_id)
            return
        for page in several.pop():
            heapq.heappush(self._free, page)
            self._num_spare -= 1

    def _free_block(self, block_id: int) -> None:
        pages = self._pages.pop(block_id, None)
        if pages is None:
            heapq.heappush(self._free, block_id)
        else:
            self._spare.setdefault(len(pages), []).append(pages)
            self._num_spare += len(pages)

    def _put_in_cache(self, block_id: int) -> None:
        size = self._size(block_id)
        self._cached[block_id] = None
        self._num_cached += size
        if self._limited_groups and self._cache.group_of(block_id) in self._limited_groups:
            self._limited[block_id] = None
            self._num_limited += size
            while self._num_limited > self._most_cached:
                oldest = next(iter(self._limited))
                self._uncache(oldest)
                self._cache.discard(oldest)
                self._free_block(oldest)

    def _uncache(self, block_id: int) -> None:
        del self._cached[block_id]
        self._forget_cached(block_id)

    def _forget_cached(self, block_id: int) -> None:
        size = self._size(block_id)
        self._num_cached -= size
        if block_id in self._limited:
            del self._limited[block_id]
            self._num_limited -= size
