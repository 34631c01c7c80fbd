"""Block pool: the pages of blocks, reference counts and eviction order.

A block is one page or several, not necessarily neighbours, and has the id of its first page. All counts are of pages,
so that blocks of any size share the pool. Invariant: every block except the null block is in exactly one state. *Used*:
referenced. *Pinned*: unreferenced, but its content is promised to stay available, so it is never evicted. *Cached*:
unreferenced, but its content can be found by hash until it is evicted, least recently used first. *Free*: none of
these.
"""

import heapq
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeGuard

import numpy as np

from tandem.kvcache.eviction_queue import BlockIds, EvictionQueue
from tandem.kvcache.prefix import NULL_BLOCK, PrefixCache

_MANY = 48  # blocks, from which on operations on columns are faster than a loop


class BlockPool:
    """Allocates pages 1 … `num_pages`, `num_total` of them; id 0 is the null block, which has no owner.

    Free pages are handed out lowest id first, so that a request's blocks tend to be neighbours and a transfer of them
    merges into few descriptors. Those of a freed block of several stay together for the next one of as many, until
    others need them. What is done to a block costs the same however many pages it has.

    Args:
        limited_groups: KV groups of which no more than `most_cached` pages in total are cached: beyond that the least
            recently used block of them becomes free.
    """

    def __init__(
        self,
        num_pages: int,
        cache: PrefixCache,
        limited_groups: frozenset[int] = frozenset(),
        most_cached: int = 0,
    ) -> None:
        self.num_total = num_pages
        self._cache = cache
        # NOTE: each is an array for single blocks, and the same memory as a column for many
        self._references, self._sizes = (array("i", bytes(4 * (num_pages + 1))) for _ in range(2))
        self._is_pinned = bytearray(num_pages + 1)
        self._reference_column = np.frombuffer(self._references, dtype=np.int32)
        self._size_column = np.frombuffer(self._sizes, dtype=np.int32)
        self._pinned_column = np.frombuffer(self._is_pinned, dtype=np.bool_)
        self._group_column = np.frombuffer(cache.groups, dtype=np.int16)
        self._scratch = np.zeros(num_pages + 1, dtype=np.int32)
        self._size_column[1:] = 1
        self._free = list(range(1, num_pages + 1))
        self._pages: dict[int, tuple[int, ...]] = {}  # of blocks of several, by id
        self._spare: dict[int, list[tuple[int, ...]]] = {}  # free pages of such blocks, by their number
        self._num_spare = 0
        self._cached = EvictionQueue(num_pages)
        self._limited_groups = limited_groups
        self._most_cached = most_cached
        self._limited = EvictionQueue(num_pages if limited_groups else 0)  # those of `_cached` of a limited group
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
        """Number of pages of these blocks that `acquire` would remove from `num_available`: those of cached blocks."""
        if not _are_many(block_ids):
            return self.num_pages(filter(self._cached.place_of, block_ids))
        many = np.frombuffer(block_ids, dtype=np.int32)
        return self._num_pages(many[self._cached.are_in(many)])

    def num_pages(self, block_ids: Iterable[int]) -> int:
        """Number of pages of these blocks together."""
        return sum(map(self._sizes.__getitem__, block_ids))

    def pages_of(self, block_id: int) -> tuple[int, ...]:
        """The pages of a block in use, its own id first."""
        return self._pages.get(block_id) or (block_id,)

    def is_wanted(self, block_id: int) -> bool:
        """Whether more than one owner references the block, or it is pinned."""
        return self._references[block_id] > 1 or bool(self._is_pinned[block_id])

    def is_used(self, block_id: int) -> bool:
        """Whether the block is referenced."""
        return self._references[block_id] > 0

    def pin(self, block_id: int) -> None:
        """Protect a block of the prefix cache from eviction until `unpin`; while unreferenced it is not available."""
        assert self._cache.holds(block_id), f"block {block_id} holds nothing that could be pinned"
        assert not self._is_pinned[block_id], f"block {block_id} is pinned already"
        self._is_pinned[block_id] = True
        if block_id in self._cached:
            self._uncache((block_id,))
            self._num_pinned += self._sizes[block_id]

    def unpin(self, block_id: int) -> None:
        """Undo `pin`. An unreferenced block is evicted next, since it is not needed any more or has a copy."""
        assert self._is_pinned[block_id], f"block {block_id} is not pinned"
        self._is_pinned[block_id] = False
        if self._references[block_id] == 0:
            self._num_pinned -= self._sizes[block_id]
            self._put_in_cache(block_id, is_next=True)

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
        """Add a reference to blocks in use or found in the prefix cache. NOTE: of a long prompt there are thousands."""
        if _are_many(block_ids) and (many := self._distinct(block_ids)) is not None:
            self._acquire_many(many)
            return
        references, is_pinned = self._references, self._is_pinned
        cached: list[int] = []
        for block_id in block_ids:
            if block_id == NULL_BLOCK:
                continue
            count = references[block_id]
            references[block_id] = count + 1
            if count:
                continue
            if is_pinned[block_id]:
                self._num_used += self._sizes[block_id]
                self._num_pinned -= self._sizes[block_id]
            else:
                cached.append(block_id)
        if cached:
            self._num_used += self.num_pages(cached)
            self._uncache(cached)

    def release(self, block_ids: Iterable[int]) -> None:
        """Drop one reference from each block. Blocks given first are evicted first: pass the end of a chain first.

        NOTE: of a long prompt there are thousands.
        """
        if _are_many(block_ids) and (many := self._distinct(block_ids)) is not None:
            self._release_many(many)
            return
        references, groups, is_pinned = self._references, self._cache.groups, self._is_pinned
        has_limit = bool(self._limited_groups)
        cached: list[int] = []
        for block_id in block_ids:
            if block_id == NULL_BLOCK:
                continue
            count = references[block_id]
            assert count > 0, f"block {block_id} was released too often"
            references[block_id] = count - 1
            if count > 1:
                continue
            if has_limit or is_pinned[block_id] or not groups[block_id]:
                self._num_used -= self._sizes[block_id]
                self._let_go(block_id)
            else:
                cached.append(block_id)
        if cached:
            num_pages = self.num_pages(cached)
            self._num_used -= num_pages
            self._num_cached += num_pages
            self._cached.extend(cached)

    @contextmanager
    def using(self, groups: Sequence["array[int]"]) -> Iterator[None]:
        """Reference found blocks of each KV group meanwhile, so that blocks that are unpinned do not displace them."""
        for block_ids in groups:
            self.acquire(block_ids)
        try:
            yield
        finally:
            for block_ids in groups:
                self.release(block_ids[::-1])

    def check(self, expected: Counter[int]) -> None:
        """Check the module's invariant, given the number of references that owners hold on each block.

        Raises:
            AssertionError: naming the first block or count that is wrong.
        """
        self._cache.check()
        self._cached.check()
        self._limited.check()
        singles, cached, limited = set(self._free), set(self._cached), set(self._limited)
        spare = [pages for several in self._spare.values() for pages in several]
        assert len(singles) == len(self._free), "a block is free twice"
        assert self._num_spare == sum(map(len, spare)), "pages of freed blocks are miscounted"
        others = Counter(page for pages in (*spare, *self._pages.values()) for page in pages)
        assert set(others.values()) <= {1}, "a page belongs to two blocks"
        assert not singles & set(others), "a page is free and belongs to a block"
        followers = {page for block_id, pages in self._pages.items() for page in pages if page != block_id}
        free = singles.union(*spare)
        assert self.num_pages(limited) == self._num_limited <= max(0, self._most_cached), "too many states cached"
        assert limited == {block_id for block_id in cached if self._is_limited(block_id)}, "another block is limited"
        sizes = {block_id: len(pages) for block_id, pages in self._pages.items()}
        assert all(size == sizes.get(block_id, 1) for block_id, size in enumerate(self._sizes) if block_id), (
            "a block has another number of pages"
        )
        assert self.num_pages(cached) == self._num_cached, "cached blocks are miscounted"
        assert not free & cached, f"blocks {free & cached} are both free and cached"
        num_known = self.num_free + self.num_cached + self.num_used + self.num_pinned
        assert num_known == self.num_total, "free + cached + used + pinned != total"
        all_pinned = set(np.flatnonzero(self._pinned_column).tolist())
        pinned = {block_id for block_id in all_pinned if not self._references[block_id]}
        num_pinned = self.num_pages(pinned)
        assert num_pinned == self.num_pinned, f"{self.num_pinned} blocks are counted as pinned; {num_pinned} are"
        assert not all_pinned & (free | cached), "a pinned block can be handed out"
        for block_id in range(1, self.num_total + 1):
            references = self._references[block_id]
            assert references == expected[block_id], (
                f"block {block_id} counts {references} references; its owners hold {expected[block_id]}"
            )
            if block_id in followers:
                assert not references, f"page {block_id} of another block is referenced itself"
                continue
            assert block_id not in all_pinned or self._cache.holds(block_id), f"pinned block {block_id} is not findable"
            idle = block_id in free or block_id in cached or block_id in pinned
            assert idle == (references == 0), f"block {block_id} with {references} references, idle={idle}"
            assert block_id not in free or not self._cache.holds(block_id), f"free block {block_id} is findable"
            assert block_id not in cached or self._cache.holds(block_id), f"cached block {block_id} is not findable"

    def _distinct(self, block_ids: "array[int]") -> BlockIds | None:
        """Many blocks as a column; None if one occurs twice."""
        many = _column(block_ids)
        numbers = np.arange(len(many), dtype=np.int32)
        self._scratch[many] = numbers
        return None if np.count_nonzero(self._scratch[many] != numbers) else many

    def _num_pages(self, block_ids: BlockIds) -> int:
        return int(self._size_column[block_ids].sum()) if self._pages else len(block_ids)

    def _acquire_many(self, block_ids: BlockIds) -> None:
        counts = self._reference_column[block_ids]
        self._reference_column[block_ids] = counts + 1
        cached = block_ids[self._cached.are_in(block_ids)]
        num_idle = len(cached)
        if self._num_pinned:
            pinned = block_ids[(counts == 0) & self._pinned_column[block_ids]]
            num_idle += len(pinned)
            num_pages = self._num_pages(pinned)
            self._num_used += num_pages
            self._num_pinned -= num_pages
        assert num_idle + np.count_nonzero(counts) == len(block_ids), "a block is acquired that is free"
        num_pages = self._num_pages(cached)
        self._num_used += num_pages
        self._num_cached -= num_pages
        self._cached.remove_column(cached)
        if len(self._limited):
            limited = cached[self._limited.are_in(cached)]
            self._num_limited -= self._num_pages(limited)
            self._limited.remove_column(limited)

    def _release_many(self, block_ids: BlockIds) -> None:
        counts = self._reference_column[block_ids] - 1
        assert not np.count_nonzero(counts < 0), f"block {block_ids[counts.argmin()]} was released too often"
        self._reference_column[block_ids] = counts
        idle = block_ids[counts == 0]
        self._num_used -= self._num_pages(idle)
        groups = self._group_column[idle]
        is_cached = (groups != 0) & ~self._pinned_column[idle]
        if any((groups == group + 1).any() for group in self._limited_groups):
            is_cached[:] = False  # NOTE: these are let go one by one, in order
        cached = idle[is_cached]
        self._cached.extend_column(cached)
        self._num_cached += self._num_pages(cached)
        for block_id in idle[~is_cached].tolist():
            self._let_go(block_id)

    def _let_go(self, block_id: int) -> None:
        """Free or cache a block whose last reference was dropped."""
        if self._is_pinned[block_id]:
            self._num_pinned += self._sizes[block_id]
        elif self._cache.groups[block_id]:
            self._put_in_cache(block_id)
        else:
            self._free_block(block_id)

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
        self._sizes[pages[0]] = count
        return pages[0]

    def _free_pages(self) -> None:
        """Let any block take some page that is free in a group of others; where there is none, evict a block."""
        several = next((spare for spare in self._spare.values() if spare), None)
        if several is None:
            block_id = self._cached.pop()
            self._forget_cached((block_id,))
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
            self._sizes[block_id] = 1
            self._spare.setdefault(len(pages), []).append(pages)
            self._num_spare += len(pages)

    def _put_in_cache(self, block_id: int, *, is_next: bool = False) -> None:
        """Cache a block. `is_next`: it is the next to be evicted."""
        size = self._sizes[block_id]
        if is_next:
            self._cached.prepend(block_id)
        else:
            self._cached.extend((block_id,))
        self._num_cached += size
        if self._limited_groups and self._is_limited(block_id):
            if is_next:
                self._limited.prepend(block_id)
            else:
                self._limited.extend((block_id,))
            self._num_limited += size
            while self._num_limited > self._most_cached:
                oldest = self._limited.first
                self._uncache((oldest,))
                self._cache.discard(oldest)
                self._free_block(oldest)

    def _is_limited(self, block_id: int) -> bool:
        return self._cache.groups[block_id] - 1 in self._limited_groups

    def _uncache(self, block_ids: Sequence[int]) -> None:
        self._cached.remove(block_ids)
        self._forget_cached(block_ids)

    def _forget_cached(self, block_ids: Sequence[int]) -> None:
        self._num_cached -= self.num_pages(block_ids)
        if self._limited_groups:
            limited = list(filter(self._limited.place_of, block_ids))
            self._num_limited -= self.num_pages(limited)
            self._limited.remove(limited)


def _are_many(block_ids: Iterable[int]) -> "TypeGuard[array[int]]":
    """Whether these are packed and so many that numpy operations on them pay."""
    return isinstance(block_ids, array) and len(block_ids) >= _MANY


def _column(block_ids: "array[int]") -> BlockIds:
    """The block ids as a numpy array, without the null block."""
    many = np.frombuffer(block_ids, dtype=np.int32)
    # NOTE: numbers are compared, which for dozens takes a tenth of the time of `all`
    return many if np.count_nonzero(many) == len(many) else many[many != NULL_BLOCK]
