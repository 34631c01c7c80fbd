"""Kept blocks: contents promised to stay available until a deadline, either in blocks of the pool that are not evicted
(up to a share of it) or as copies in the host tier.

Invariant: until its deadline every content is in the pool, the host tier or both, so no more is promised than both can
hold. A promise is broken in one case only: if a live request could never run otherwise. Time is an argument.
"""

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from tandem.core.events import BlockEvent, BlockEventSink, BlockRemoved
from tandem.kvcache.block_pool import BlockPool
from tandem.kvcache.prefix import PrefixCache
from tandem.kvcache.tiers import BlockKey, HostMove, HostRead, HostTier

MAX_MOVED_BLOCKS = 64  # per move, so that space is freed gradually
_MAX_STALE_ENDS = 64


@dataclass(frozen=True, slots=True)
class KeptUsage:
    """Current numbers, and totals since start.

    num_kept: contents promised. num_host: the part of them with a copy in the host tier, which has `num_slots`.
    num_moved, num_restored: total blocks copied to the host tier and back. num_broken: total promises broken.
    """

    num_kept: int = 0
    num_host: int = 0
    num_slots: int = 0
    num_moved: int = 0
    num_restored: int = 0
    num_broken: int = 0


@dataclass(slots=True, eq=False)
class _Kept:
    """A promised content. `block_id`: its block in the pool, if any. `slot`: its copy in the host tier, if any."""

    ends_s: float
    block_id: int | None
    slot: int | None = None


@dataclass(slots=True)
class _Move:
    """A copy to the host tier in progress: block and slot of each content."""

    entries: dict[BlockKey, tuple[_Kept, int, int]] = field(default_factory=dict)


class KeptBlocks:
    """Promised contents of one pool.

    Args:
        limit: maximum number of kept blocks in the pool.
        emit: receives an event for each content removed from the host tier that the pool does not hold either.
    """

    def __init__(self, pool: BlockPool, cache: PrefixCache, limit: int, emit: BlockEventSink | None) -> None:
        self._pool = pool
        self._cache = cache
        self._limit = limit
        self._emit = emit
        self._host = HostTier(0)
        self._start_move: Callable[[HostMove], None] | None = None
        self._kept: dict[BlockKey, _Kept] = {}
        self._pooled: OrderedDict[BlockKey, None] = OrderedDict()  # kept in the pool and not moving, oldest use first
        self._doubled: OrderedDict[BlockKey, None] = OrderedDict()  # of those, the ones with a copy, oldest first
        self._ends: list[tuple[float, int, BlockKey]] = []
        self._moves: dict[int, _Move] = {}
        self._sources: Counter[int] = Counter()
        self._num_ends = self._num_moves = 0
        self._num_moved = self._num_restored = self._num_broken = 0

    @property
    def usage(self) -> KeptUsage:
        num_host = self._host.num_taken - self._host.num_leaving - len(self.moving_block_ids)
        totals = (self._num_moved, self._num_restored, self._num_broken)
        return KeptUsage(len(self._kept), num_host, self._host.num_slots, *totals)

    @property
    def room(self) -> int:
        """Number of further contents that can be promised."""
        if self._start_move is None:
            return max(0, self._limit - len(self._pooled) - len(self._moves))
        return max(0, self._limit + self._host.num_slots - self._host.num_leaving - len(self._kept))

    @property
    def moving_block_ids(self) -> list[int]:
        """Blocks of the pool that are being copied to the host tier."""
        return [block_id for move in self._moves.values() for _, block_id, _ in move.entries.values()]

    @property
    def read_block_ids(self) -> list[int]:
        """Blocks of the pool that are being read by copies, each listed once per reference."""
        return [*self.moving_block_ids, *self._sources.elements()]

    def attach_host(self, num_slots: int, start_move: Callable[[HostMove], None]) -> None:
        """Use a host tier from now on; call once. `start_move` must start a copy without blocking; its end is reported
        by `end_move`.
        """
        assert self._host.num_slots == 0, "there is a host tier already"
        self._host, self._start_move = HostTier(num_slots), start_move

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._kept

    def slot_of(self, key: BlockKey) -> int | None:
        """Slot of the host tier that holds this content, or None."""
        kept = self._kept.get(key)
        return None if kept is None else kept.slot

    def keep(self, blocks: Sequence[tuple[BlockKey, int]], ends_s: float) -> None:
        """Promise the contents of these cached blocks of a chain, in order, until `ends_s` or their later deadline.

        The caller has checked the number of new ones against `room`.
        """
        for key, block_id in reversed(blocks):  # NOTE: of equally old ones, the end of a chain goes first
            kept = self._kept.get(key)
            if kept is None:
                kept = self._kept[key] = _Kept(ends_s, None)
                self._note_end(key, kept)
            elif ends_s > kept.ends_s:
                kept.ends_s = ends_s
                self._note_end(key, kept)
            self._to_pool(key, kept, block_id)
        self._keep_to_share()

    def expire(self, now_s: float) -> None:
        """Drop the promises whose deadline has passed."""
        while self._ends and self._ends[0][0] <= now_s:
            _, _, key = heapq.heappop(self._ends)
            kept = self._kept.get(key)
            if kept is not None and kept.ends_s <= now_s:
                self._forget(key)
        self._drop_stale_ends()

    def yield_blocks(self, count: int, *, must: bool) -> None:
        """Make about `count` unreferenced kept blocks evictable, least recently used first: those with a copy at once,
        others after a move to the host tier that starts now. With `must`, promises it has no slot for are broken.
        """
        count -= len(self.moving_block_ids)
        if count <= 0 or not (must or self._doubled or self._start_move is not None):
            return
        idle = list(islice((key for key in self._pooled if not self._pool.is_used(self._block_of(key))), count))
        num_gone = self._spill(count, idle)
        if must:
            for key in idle[num_gone:]:
                self._forget(key)
                self._num_broken += 1
            self._drop_stale_ends()

    def end_move(self, move_id: int, *, is_copied: bool) -> None:
        """Record the end of a move. If it failed, its contents stay in the pool and no further moves are started."""
        move = self._moves.pop(move_id)
        for key, (kept, block_id, slot) in move.entries.items():
            is_kept = self._kept.get(key) is kept
            if not (is_copied and is_kept and kept.slot is None):
                self._host.give_back(slot)
                if is_kept and kept.slot is None:
                    self._to_pool(key, kept, block_id)
                continue
            kept.slot = slot
            self._num_moved += 1
            if key in self._pooled:  # NOTE: it was used meanwhile, so it stays in the pool too
                self._doubled[key] = None
            else:
                self._pool.let_go(block_id)
                kept.block_id = None
        self._pool.release(reversed([block_id for _, block_id, _ in move.entries.values()]))
        if not is_copied:
            self._start_move = None
        self._keep_to_share()

    def begin_read(self, key: BlockKey) -> int | None:
        """Returns the slot with this content, which is not reused until `end_reads`; None if there is none."""
        slot = self.slot_of(key)
        if slot is not None:
            self._host.begin_read(slot)
        return slot

    def begin_block_read(self, block_id: int) -> None:
        """Protect this block of the pool from reuse until `end_reads`."""
        self._pool.acquire([block_id])
        self._sources[block_id] += 1

    def end_reads(self, reads: Sequence[HostRead], *, is_restored: bool) -> None:
        """Record that these reads have ended."""
        slots = [read.slot for read in reads if read.slot is not None]
        sources = [read.source_id for read in reads if read.slot is None]
        self._host.end_reads(slots)
        self._sources -= Counter(sources)
        self._pool.release(reversed(sources))
        self._num_restored += len(slots) * is_restored
        self._keep_to_share()

    def passed_on(self, event: BlockEvent) -> bool:
        """Whether to publish this event of the pool; not if the host tier holds the content before and after."""
        return self.slot_of((event.group, event.block_hash)) is None

    def check(self) -> None:
        """Check the module's invariant.

        Raises:
            AssertionError: naming what is wrong.
        """
        moving = {key: block_id for move in self._moves.values() for key, (_, block_id, _) in move.entries.items()}
        for key, kept in self._kept.items():
            assert kept.block_id is not None or kept.slot is not None, f"a promised content is nowhere: {key}"
            assert kept.block_id is None or self._cache.lookup(key[1], key[0]) == kept.block_id, (
                "kept block, other content"
            )
            assert (key in self._pooled) <= (kept.block_id is not None), "a content is not where it is counted"
            assert kept.block_id is None or key in self._pooled or moving.get(key) == kept.block_id, "kept, not counted"
            assert (key in self._doubled) == (key in self._pooled and kept.slot is not None), "copies are miscounted"
        assert set(self._pooled) <= set(self._kept), "a pinned block has no promise"
        assert len(self._kept) <= self._limit + self._host.num_slots, "more is promised than can be held"
        assert len(self._ends) <= 2 * len(self._kept) + _MAX_STALE_ENDS, "times that are over pile up"
        self._host.check(self._taken_slots())

    def _taken_slots(self) -> Iterator[int]:
        yield from (kept.slot for kept in self._kept.values() if kept.slot is not None)
        yield from (slot for move in self._moves.values() for _, _, slot in move.entries.values())

    def _block_of(self, key: BlockKey) -> int:
        block_id = self._kept[key].block_id
        assert block_id is not None
        return block_id

    def _to_pool(self, key: BlockKey, kept: _Kept, block_id: int) -> None:
        """Keep the content in this block of the pool, as the most recently used one."""
        if kept.block_id is None:
            self._pool.keep(block_id)
            kept.block_id = block_id
        assert kept.block_id == block_id, "a content is in two blocks"
        self._pooled[key] = None
        self._pooled.move_to_end(key)
        if kept.slot is not None:
            self._doubled[key] = None
            self._doubled.move_to_end(key)

    def _keep_to_share(self) -> None:
        """Move contents beyond the pool's share to the host tier. NOTE: a few may wait for slots still in use."""
        self._spill(len(self._pooled) - self._limit, self._pooled)

    def _spill(self, count: int, keys: Iterable[BlockKey]) -> int:
        """Start moving up to `count` of these to the host tier, as far as it has slots; returns the number moved."""
        chosen = list(islice(keys, max(0, count)))
        move = _Move()
        num_gone = 0
        for key in chosen:
            kept, block_id = self._kept[key], self._block_of(key)
            if kept.slot is None:
                slot = self._spare_slot()
                if slot is None:
                    break
                move.entries[key] = (kept, block_id, slot)
            else:
                kept.block_id = None
                self._pool.let_go(block_id)
            self._pooled.pop(key)
            self._doubled.pop(key, None)
            num_gone += 1
            if len(move.entries) == MAX_MOVED_BLOCKS:
                self._begin(move)
                move = _Move()
        self._begin(move)
        return num_gone

    def _begin(self, move: _Move) -> None:
        if not move.entries:
            return
        assert self._start_move is not None
        self._num_moves += 1
        pairs = tuple((block_id, slot) for _, block_id, slot in move.entries.values())
        self._pool.acquire(block_id for block_id, _ in pairs)
        self._moves[self._num_moves] = move
        self._start_move(HostMove(self._num_moves, pairs))

    def _spare_slot(self) -> int | None:
        """Returns a slot of the host tier; if none is free, one whose content the pool keeps too."""
        if self._start_move is None:
            return None
        while not self._host.num_free and self._doubled:
            key, _ = self._doubled.popitem(last=False)
            self._drop_slot(self._kept[key])
        return self._host.take() if self._host.num_free else None

    def _drop_slot(self, kept: _Kept) -> None:
        assert kept.slot is not None
        self._host.give_back(kept.slot)
        kept.slot = None

    def _forget(self, key: BlockKey) -> None:
        kept = self._kept.pop(key)
        self._pooled.pop(key, None)
        self._doubled.pop(key, None)
        if kept.block_id is not None:
            self._pool.let_go(kept.block_id)
        if kept.slot is not None:
            self._drop_slot(kept)
            group, block_hash = key
            if self._emit is not None and self._cache.lookup(block_hash, group) is None:
                self._emit(BlockRemoved(block_hash, group))

    def _note_end(self, key: BlockKey, kept: _Kept) -> None:
        """NOTE: among equal deadlines the newest expires first, and so the beginning of a chain; what expires first is
        evicted last.
        """
        self._num_ends += 1
        heapq.heappush(self._ends, (kept.ends_s, -self._num_ends, key))
        self._drop_stale_ends()

    def _drop_stale_ends(self) -> None:
        if len(self._ends) > 2 * len(self._kept) + _MAX_STALE_ENDS:
            self._ends = [(each.ends_s, -index, k) for index, (k, each) in enumerate(self._kept.items())]
            heapq.heapify(self._ends)
