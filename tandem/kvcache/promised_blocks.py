"""Pinned blocks: contents promised to stay available until a deadline; `pinned_prefixes` decides which.

Each is in a block of the pool that is not evicted (up to a share of the pool), in the host tier as a copy, or both; so
no more is promised than both can hold. A promise is broken in one case only: if a live request could never run
otherwise. Time is an argument.
"""

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from tandem.core.events import BlockEvent, BlockEventSink, BlockRemoved
from tandem.kvcache.block_pool import BlockPool
from tandem.kvcache.prefix import PrefixCache
from tandem.kvcache.tiers import BlockKey, HostMove, HostRead, HostTier

MAX_MOVED_BLOCKS = 64  # pages per move, or one block, so that space is freed gradually
_MAX_STALE_ENDS = 64  # deadlines that were extended, kept beside those that count


@dataclass(frozen=True, slots=True)
class PromisedUsage:
    """Current numbers of pages, and totals since start.

    Args:
        num_pinned: pages of contents promised.
        num_host: pages with a copy in the host tier, which has `num_slots`.
        num_moved, num_restored: pages copied to the host tier and back, in total.
        num_broken: promises broken, in total.
    """

    num_pinned: int = 0
    num_host: int = 0
    num_slots: int = 0
    num_moved: int = 0
    num_restored: int = 0
    num_broken: int = 0


@dataclass(slots=True, eq=False)
class _Promise:
    """A promised content. `block_id`: its block in the pool, if any. `slots`: its copy in the host tier, if any."""

    ends_s: float
    num_pages: int
    block_id: int | None = None
    slots: tuple[int, ...] = ()


@dataclass(slots=True)
class _Move:
    """A copy to the host tier in progress: block and slots of each content."""

    entries: dict[BlockKey, tuple[_Promise, int, tuple[int, ...]]] = field(default_factory=dict)

    @property
    def num_pages(self) -> int:
        return sum(len(slots) for _, _, slots in self.entries.values())


class PromisedBlocks:
    """Promised contents of one pool.

    Args:
        limit: maximum number of pages of pinned blocks in the pool.
        emit: receives an event for each content removed from the host tier that the pool does not hold either.
    """

    def __init__(self, pool: BlockPool, cache: PrefixCache, limit: int, emit: BlockEventSink | None) -> None:
        self._pool = pool
        self._cache = cache
        self._limit = limit
        self._emit = emit
        self._host = HostTier(0)
        self._start_move: Callable[[HostMove], None] | None = None
        self._promises: dict[BlockKey, _Promise] = {}
        self._pooled: OrderedDict[BlockKey, None] = OrderedDict()  # in the pool and not moving, oldest use first
        self._doubled: OrderedDict[BlockKey, None] = OrderedDict()  # of those, the ones with a copy, oldest first
        self._ends: list[tuple[float, int, BlockKey]] = []
        self._moves: dict[int, _Move] = {}
        self._sources: Counter[int] = Counter()
        self._num_ends = self._num_moves = 0
        self._num_pinned_pages = self._num_pooled_pages = 0
        self._num_moved = self._num_restored = self._num_broken = 0

    @property
    def usage(self) -> PromisedUsage:
        num_host = self._host.num_taken - self._host.num_leaving - self._num_moving
        totals = (self._num_moved, self._num_restored, self._num_broken)
        return PromisedUsage(self._num_pinned_pages, num_host, self._host.num_slots, *totals)

    @property
    def room(self) -> int:
        """Number of pages of further contents that can be promised."""
        if self._start_move is None:
            return max(0, self._limit - self._num_pooled_pages - self._num_moving)
        return max(0, self._limit + self._host.num_slots - self._host.num_leaving - self._num_pinned_pages)

    @property
    def _num_moving(self) -> int:
        return sum(move.num_pages for move in self._moves.values())

    @property
    def moving_block_ids(self) -> list[int]:
        """Blocks of the pool that are being copied to the host tier."""
        return [block_id for move in self._moves.values() for _, block_id, _ in move.entries.values()]

    @property
    def read_block_ids(self) -> list[int]:
        """Blocks of the pool that are being read by copies, each listed once per reference."""
        return [*self.moving_block_ids, *self._sources.elements()]

    def attach_host(self, num_slots: int, start_move: Callable[[HostMove], None]) -> None:
        """Use a host tier (slots in host memory, `tiers`) from now on; call once. `start_move` must start a copy
        without blocking; its end is reported by `end_move`.
        """
        assert self._host.num_slots == 0, "there is a host tier already"
        self._host, self._start_move = HostTier(num_slots), start_move

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._promises

    def slots_of(self, key: BlockKey) -> tuple[int, ...]:
        """Slots of the host tier that hold this content; none if it does not."""
        promise = self._promises.get(key)
        return () if promise is None else promise.slots

    def pin(self, blocks: Sequence[tuple[BlockKey, int]], ends_s: float) -> None:
        """Promise the contents of these cached blocks of a chain, in order, until `ends_s` or their later deadline.

        The caller has checked the pages of new ones against `room`.
        """
        for key, block_id in reversed(blocks):  # NOTE: of equally old ones, the end of a chain goes first
            promise = self._promises.get(key)
            if promise is None:
                promise = self._promises[key] = _Promise(ends_s, self._pool.num_pages([block_id]))
                self._num_pinned_pages += promise.num_pages
                self._note_end(key, promise)
            elif ends_s > promise.ends_s:
                promise.ends_s = ends_s
                self._note_end(key, promise)
            self._to_pool(key, promise, block_id)
        self._move_excess()

    def expire(self, now_s: float) -> None:
        """Drop the promises whose deadline has passed."""
        while self._ends and self._ends[0][0] <= now_s:
            _, _, key = heapq.heappop(self._ends)
            promise = self._promises.get(key)
            if promise is not None and promise.ends_s <= now_s:
                self._forget(key)
        self._drop_stale_ends()

    def yield_blocks(self, count: int, *, must: bool) -> None:
        """Make about `count` pages of unreferenced pinned blocks evictable, least recently used first: those with a
        copy at once, others after a move to the host tier that starts now. With `must`, promises it has no slots for
        are broken.
        """
        count -= self._num_moving
        if count <= 0 or not (must or self._doubled or self._start_move is not None):
            return
        idle = list(self._first(count, (key for key in self._pooled if not self._pool.is_used(self._block_of(key)))))
        num_gone = self._spill(idle)
        if must:
            for key in idle[num_gone:]:
                self._forget(key)
                self._num_broken += 1
            self._drop_stale_ends()

    def end_move(self, move_id: int, *, is_copied: bool) -> None:
        """Record the end of a move. If it failed, its contents stay in the pool and no further moves are started."""
        move = self._moves.pop(move_id)
        for key, (promise, block_id, slots) in move.entries.items():
            is_promised = self._promises.get(key) is promise
            if not (is_copied and is_promised and not promise.slots):
                self._host.give_back(slots)
                if is_promised and not promise.slots:
                    self._to_pool(key, promise, block_id)
                continue
            promise.slots = slots
            self._num_moved += len(slots)
            if key in self._pooled:  # NOTE: it was used meanwhile, so it stays in the pool too
                self._doubled[key] = None
            else:
                self._pool.unpin(block_id)
                promise.block_id = None
        self._pool.release(reversed([block_id for _, block_id, _ in move.entries.values()]))
        if not is_copied:
            self._start_move = None
        self._move_excess()

    def begin_read(self, key: BlockKey) -> tuple[int, ...]:
        """Returns the slots with this content, which are not reused until `end_reads`; there may be none."""
        slots = self.slots_of(key)
        self._host.begin_read(slots)
        return slots

    def begin_block_read(self, block_id: int) -> None:
        """Protect this block of the pool from reuse until `end_reads`."""
        self._pool.acquire([block_id])
        self._sources[block_id] += 1

    def end_reads(self, reads: Sequence[HostRead], *, is_restored: bool) -> None:
        """Record that these reads have ended. `is_restored`: their copies succeeded, and are counted."""
        slots = [slot for read in reads for slot in read.slots]
        sources = [read.source_id for read in reads if not read.slots]
        self._host.end_reads(slots)
        self._sources -= Counter(sources)
        self._pool.release(reversed(sources))
        self._num_restored += len(slots) * is_restored
        self._move_excess()

    def passed_on(self, event: BlockEvent) -> bool:
        """Whether to publish this event of the pool; not if the host tier holds the content before and after."""
        return not self.slots_of((event.group, event.block_hash))

    def check(self) -> None:
        """Check the module's invariant.

        Raises:
            AssertionError: naming what is wrong.
        """
        moving = {key: block_id for move in self._moves.values() for key, (_, block_id, _) in move.entries.items()}
        for key, promise in self._promises.items():
            assert promise.block_id is not None or promise.slots, f"a promised content is nowhere: {key}"
            assert promise.block_id is None or self._cache.lookup(key[1], key[0]) == promise.block_id, (
                "pinned block, other content"
            )
            assert (key in self._pooled) <= (promise.block_id is not None), "a content is not where it is counted"
            assert promise.block_id is None or key in self._pooled or moving.get(key) == promise.block_id, (
                "pinned, not counted"
            )
            assert (key in self._doubled) == (key in self._pooled and bool(promise.slots)), "copies are miscounted"
            assert len(promise.slots) in (0, promise.num_pages), f"a copy has some pages only: {key}"
        assert set(self._pooled) <= set(self._promises), "a pinned block has no promise"
        assert self._num_pinned_pages == sum(promise.num_pages for promise in self._promises.values()), (
            "pinned pages are miscounted"
        )
        assert self._num_pooled_pages == sum(self._promises[key].num_pages for key in self._pooled), (
            "pages are miscounted"
        )
        assert self._num_pinned_pages <= self._limit + self._host.num_slots, "more is promised than can be held"
        assert len(self._ends) <= 2 * len(self._promises) + _MAX_STALE_ENDS, "times that are over pile up"
        self._host.check(self._taken_slots())

    def _taken_slots(self) -> Iterator[int]:
        yield from (slot for promise in self._promises.values() for slot in promise.slots)
        yield from (slot for move in self._moves.values() for _, _, slots in move.entries.values() for slot in slots)

    def _block_of(self, key: BlockKey) -> int:
        block_id = self._promises[key].block_id
        assert block_id is not None
        return block_id

    def _to_pool(self, key: BlockKey, promise: _Promise, block_id: int) -> None:
        """Keep the content in this block of the pool, as the most recently used one."""
        if promise.block_id is None:
            self._pool.pin(block_id)
            promise.block_id = block_id
        assert promise.block_id == block_id, "a content is in two blocks"
        if key not in self._pooled:
            self._num_pooled_pages += promise.num_pages
        self._pooled[key] = None
        self._pooled.move_to_end(key)
        if promise.slots:
            self._doubled[key] = None
            self._doubled.move_to_end(key)

    def _unpool(self, key: BlockKey) -> None:
        if key in self._pooled:
            del self._pooled[key]
            self._num_pooled_pages -= self._promises[key].num_pages
        self._doubled.pop(key, None)

    def _move_excess(self) -> None:
        """Move contents beyond the pool's share to the host tier. NOTE: a few may wait for slots still in use."""
        self._spill(list(self._first(self._num_pooled_pages - self._limit, self._pooled)))

    def _first(self, count: int, keys: Iterable[BlockKey]) -> Iterator[BlockKey]:
        """The first contents that together have `count` pages, or all."""
        for key in keys:
            if count <= 0:
                return
            yield key
            count -= self._promises[key].num_pages

    def _spill(self, chosen: Sequence[BlockKey]) -> int:
        """Start moving contents to the host tier, as far as it has slots; returns the number of contents moved."""
        move = _Move()
        num_gone = 0
        for key in chosen:
            promise, block_id = self._promises[key], self._block_of(key)
            if not promise.slots:
                slots = self._spare_slots(promise.num_pages)
                if not slots:
                    break
                move.entries[key] = (promise, block_id, slots)
            else:
                promise.block_id = None
                self._pool.unpin(block_id)
            self._unpool(key)
            num_gone += 1
            if move.num_pages >= MAX_MOVED_BLOCKS:
                self._begin(move)
                move = _Move()
        self._begin(move)
        return num_gone

    def _begin(self, move: _Move) -> None:
        if not move.entries:
            return
        assert self._start_move is not None
        self._num_moves += 1
        self._pool.acquire(block_id for _, block_id, _ in move.entries.values())
        pairs = tuple(
            pair
            for _, block_id, slots in move.entries.values()
            for pair in zip(self._pool.pages_of(block_id), slots, strict=True)
        )
        self._moves[self._num_moves] = move
        self._start_move(HostMove(self._num_moves, pairs))

    def _spare_slots(self, count: int) -> tuple[int, ...]:
        """Returns `count` slots of the host tier, taking copies of contents that the pool has too if too few are free;
        empty if there are not enough.
        """
        if self._start_move is None:
            return ()
        while self._host.num_free < count and self._doubled:
            key, _ = self._doubled.popitem(last=False)
            self._drop_slots(self._promises[key])
        return self._host.take(count) if self._host.num_free >= count else ()

    def _drop_slots(self, promise: _Promise) -> None:
        self._host.give_back(promise.slots)
        promise.slots = ()

    def _forget(self, key: BlockKey) -> None:
        self._unpool(key)
        promise = self._promises.pop(key)
        self._num_pinned_pages -= promise.num_pages
        if promise.block_id is not None:
            self._pool.unpin(promise.block_id)
        if promise.slots:
            self._drop_slots(promise)
            group, block_hash = key
            is_gone = promise.block_id is None and self._cache.lookup(block_hash, group) is None
            if self._emit is not None and is_gone:  # NOTE: a block of the pool tells by itself that it is gone
                self._emit(BlockRemoved(block_hash, group))

    def _note_end(self, key: BlockKey, promise: _Promise) -> None:
        """NOTE: among equal deadlines the newest expires first, and so the beginning of a chain; what expires first is
        evicted last.
        """
        self._num_ends += 1
        heapq.heappush(self._ends, (promise.ends_s, -self._num_ends, key))
        self._drop_stale_ends()

    def _drop_stale_ends(self) -> None:
        if len(self._ends) > 2 * len(self._promises) + _MAX_STALE_ENDS:
            self._ends = [(each.ends_s, -index, k) for index, (k, each) in enumerate(self._promises.items())]
            heapq.heapify(self._ends)
