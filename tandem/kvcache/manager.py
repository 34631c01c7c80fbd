"""KV cache manager: allocates blocks to owners (requests) and to holds, and releases them. It counts in pages.

A hold protects blocks from reuse beyond the life of their owner: a peer may read leased blocks, a transfer may still
write or read others. A pinned prefix stays in the cache until a deadline (`pinned_prefixes`).
Invariant, checked by `check()`: the states of `KVCacheUsage` add up to the pool, and every reference belongs to an
owner's block table or to a hold.
"""

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import chain
from operator import ge

from tandem.core.events import BlockEvent, BlockEventSink
from tandem.kvcache.arriving import ArrivingBlocks
from tandem.kvcache.block_pool import BlockPool
from tandem.kvcache.block_table import BlockRange, BlockTable
from tandem.kvcache.checkpoints import Checkpoints
from tandem.kvcache.needs import Needs
from tandem.kvcache.pinned_prefixes import PinnedPrefixes
from tandem.kvcache.prefix import CachedRun, HashPrefixCache, NoPrefixCache, PrefixCache, PrefixMatch, longest_prefix
from tandem.kvcache.promised_blocks import PromisedBlocks
from tandem.kvcache.spec import KVLayout
from tandem.kvcache.usage import HeldState, KVCacheUsage

_STATE_SHARE = 0.5  # of the pages, the most that hold states which no request uses
_GROWTH_BLOCKS = 8  # blocks that the only owner gets at a time if it must take pinned ones


class HoldKind(StrEnum):
    """Reason for a hold on blocks."""

    LEASED = "leased"  # another worker may read them
    TRANSFER = "transfer"  # a transfer may still write or read them here


@dataclass(slots=True)
class _Hold:
    kind: HoldKind
    block_ids: "array[int]" = field(default_factory=lambda: array("i"))


class KVCacheManager:
    """Manages the blocks of one pool and one prefix cache; `pinned` are its pinned prefixes.

    Args:
        layout: KV groups and block size.
        num_pages: pages in the KV cache memory, without the null block.
        max_chunk_tokens: maximum number of tokens by which one owner's cursor moves in one step.
        prefix_caching: whether computed blocks can be found again by hash.
        watermark_pages: pages that admission leaves available for running owners to grow into.
        pin_share: maximum share of the pages that pinned prefixes occupy, 0 to 1.
        emit: receives every stored/removed event.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_pages: int,
        *,
        max_chunk_tokens: int,
        prefix_caching: bool = True,
        watermark_pages: int = 0,
        pin_share: float = 0.5,
        emit: BlockEventSink | None = None,
    ) -> None:
        self.layout = layout
        self.max_chunk_tokens = max_chunk_tokens
        self.prefix_caching = prefix_caching
        self._watermark_pages = watermark_pages
        self._emit = emit
        self._cache: PrefixCache = (
            HashPrefixCache(len(layout.groups), num_pages, self._tell) if prefix_caching else NoPrefixCache(num_pages)
        )
        self._needs = Needs(layout, max_chunk_tokens)
        self._pages_per_block = [group.pages_per_block for group in layout.groups]
        states = [group for group, found in enumerate(layout.groups) if found.spec.bytes_per_request]
        self._pool = BlockPool(num_pages, self._cache, frozenset(states), int(num_pages * _STATE_SHARE))
        self._checkpoints = Checkpoints(layout, self._pool, self._cache)
        self._arriving = ArrivingBlocks(layout, self._pool, self._cache)
        promised = PromisedBlocks(self._pool, self._cache, int(num_pages * pin_share), emit)
        self.pinned = PinnedPrefixes(layout, self._pool, self._cache, promised, lambda: self.num_unpromised)
        self._tables: dict[str, BlockTable] = {}
        self._hashes_in_flight: dict[str, Sequence[bytes]] = {}
        self._in_flight: Counter[bytes] = Counter()
        self._coming: Counter[bytes] = Counter()
        self._owners_waiting: set[str] = set()  # whose hashes are counted in `_coming`
        self._num_promised = 0
        self._holds: dict[str, _Hold] = {}

    @property
    def usage(self) -> KVCacheUsage:
        pool = self._pool
        transferring = self._held(HoldKind.TRANSFER).union(self.pinned.blocks.read_block_ids)
        leased = self._held(HoldKind.LEASED) - transferring
        num_leased, num_transferring = pool.num_pages(leased), pool.num_pages(transferring)
        used = pool.num_used - num_leased - num_transferring
        return KVCacheUsage(
            pool.num_total, pool.num_free, pool.num_cached, used, num_leased, num_transferring, pool.num_pinned
        )

    def held_state(self, positions: Mapping[str, int]) -> HeldState:
        """State that owners hold, in bytes. `positions`: of the next query of each owner."""
        return HeldState.of(self.layout, ((table, positions.get(owner, 0)) for owner, table in self._tables.items()))

    @property
    def num_unpromised(self) -> int:
        """Number of pages that are free or evictable and not promised to an owner that will grow into them."""
        return max(0, self._pool.num_available - self._num_promised)

    def fits(self, num_tokens: int) -> bool:
        """Whether an owner of `num_tokens` fits into an otherwise empty pool."""
        return self.layout.blocks_for(num_tokens, self.max_chunk_tokens) <= self._pool.num_total

    def match(self, hashes: Sequence[bytes], num_tokens: int, num_expected_tokens: int = 0) -> PrefixMatch:
        """Longest cached prefix from which an owner of `num_tokens` tokens could start. At least one token is left to
        compute, for its logits. `num_expected_tokens`: leading tokens whose KV can come from another worker.
        """
        found = longest_prefix(self._cache, self.layout, hashes, (num_tokens - 1) // self.layout.block_size)
        if num_expected_tokens <= found.num_blocks * self.layout.block_size:
            return found
        next_position = min(num_expected_tokens, num_tokens - 1)
        return self._arriving.completed(found, hashes, num_expected_tokens, next_position)

    def is_being_computed(self, block_hash: bytes) -> bool:
        """Whether an owner is about to compute this block, so that waiting for it beats computing it twice."""
        return self._in_flight[block_hash] > 0

    def is_coming(self, block_hash: bytes) -> bool:
        """Whether an owner expects this missing block from a worker that has yet to compute it, at an unknown time."""
        groups = range(len(self.layout.groups))
        return self._coming[block_hash] > 0 and any(self._cache.lookup(block_hash, group) is None for group in groups)

    def coming(self, hashes: Sequence[bytes], first: int, end: int, *, to_start: bool) -> tuple[int, int]:
        """Returns (number of blocks `[first, end)` of a chain that can be shared once they arrive, number that arrive)
        for the owner expecting blocks from another worker that shares most. `to_start`: all groups must have them.
        """
        if first >= end or not self._coming[hashes[first]]:
            return 0, 0
        return max(self._coming_to(owner, hashes, first, end, to_start) for owner in self._owners_waiting)

    def can_admit(self, match: PrefixMatch, num_tokens: int) -> bool:
        """Whether an owner of `num_tokens` starting from `match` fits beside the blocks promised to other owners."""
        return self._num_short(match, num_tokens) <= 0

    def make_room(self, match: PrefixMatch, num_tokens: int) -> bool:
        """Free pinned blocks for an owner that `can_admit` refuses; returns whether it fits now.

        Pinned blocks move to the host tier while it has slots, which takes time. Promises are broken for the rest only
        if no other owner has blocks that will be released: otherwise this owner could never run. `match` stays whole.
        """
        if not self._pool.num_pinned:
            return False
        with self._pool.using(match.found):
            while (num_short := self._num_short(match, num_tokens)) > 0:
                if not self._yield(num_short, not self._tables and not self._holds):
                    return False
        return True

    def make_room_to_grow(self, owner: str, num_tokens: int) -> bool:
        """Like `make_room`, for an owner that cannot grow; returns whether any blocks became available."""
        own = {block_id for blocks in self._tables[owner].groups for block_id in blocks}
        is_alone = len(self._tables) == 1 and all(own.issuperset(hold.block_ids) for hold in self._holds.values())
        entries = self._needs.entries(self._tables[owner].num_blocks, self.layout.num_blocks(num_tokens))
        num_short = self._needs.num_pages(entries) - self._pool.num_available
        return self._yield(num_short + is_alone * _GROWTH_BLOCKS, is_alone)

    def admit(
        self,
        owner: str,
        match: PrefixMatch,
        hashes: Sequence[bytes],
        num_tokens: int,
        *,
        is_coming: bool = False,
        checkpoints: frozenset[int] = frozenset(),
    ) -> BlockTable:
        """Create `owner`'s block table, which starts with the matched blocks.

        Args:
            hashes: the whole chain; blocks beyond the match are computed by it, or by another worker (`is_coming`).
            checkpoints: see `BlockTable`; the block after which it diverges from other prompts is one more.
        """
        assert owner not in self._tables, f"{owner} already owns blocks"
        for block_ids in match.block_ids:
            self._pool.acquire(block_ids)
        groups = tuple(block_ids[:] for block_ids in match.block_ids)
        checkpoints |= self._checkpoints.divergence(hashes, match.num_blocks)
        table = BlockTable(groups, list(match.num_dropped), num_tokens, match.num_blocks, 0, checkpoints)
        self._renew_promise(table)
        self._tables[owner] = table
        self._hashes_in_flight[owner] = tuple(hashes[match.num_blocks :]) if self.prefix_caching else ()
        if is_coming:
            self._owners_waiting.add(owner)
        self._counted(owner).update(self._hashes_in_flight[owner])
        return table

    def grow(self, owner: str, num_computed_tokens: int, num_tokens: int) -> bool:
        """Allocate the blocks needed to move the cursor from `num_computed_tokens` to `num_tokens`.

        If new blocks are needed, those that no query attends to any more are released first. Returns False, with
        nothing allocated, if too few are available.
        """
        table = self._tables[owner]
        num_blocks = self.layout.num_blocks(num_tokens)
        if num_blocks <= table.num_blocks:
            return True
        self._drop_unseen(table, num_computed_tokens)
        entries, num_before = self._needs.entries(table.num_blocks, num_blocks), table.num_blocks
        enough = self._needs.num_pages(entries) <= self._pool.num_available
        if enough:
            for group, indices in enumerate(entries):
                new = self._pool.allocate(len(indices), self._pages_per_block[group])
                table.extend(group, num_blocks, indices, new)
        self._renew_promise(table)
        self._checkpoints.take(table, num_before, self.num_unpromised - self._watermark_pages)
        return enough

    def reserve(
        self, owner: str, num_tokens: int, next_position: int, more: Sequence[CachedRun]
    ) -> tuple[BlockRange, ...]:
        """Give `owner`, just admitted, all blocks of `num_tokens` tokens whose KV comes from another worker: `more`,
        which were found with its match, and new ones.

        Returns the new blocks, to fill; none that the query at `next_position` does not attend to.
        """
        table, num_blocks = self._tables[owner], self.layout.num_blocks(num_tokens)
        firsts = self._arriving.extend(table, more, self._needs.first_blocks(next_position), num_blocks)
        self._renew_promise(table)
        return self._with_pages(table.ranges(firsts, num_blocks))

    def lease(self, owner: str, num_tokens: int, first_block: int, end_block: int, name: str) -> tuple[BlockRange, ...]:
        """Lease under `name` those of the owner's blocks `[first_block, end_block)` that the last query of `num_tokens`
        tokens attends to, which are all that a reader needs.
        """
        firsts = [max(first_block, first) for first in self._needs.first_blocks(num_tokens - 1)]
        ranges = self._with_pages(self._tables[owner].ranges(firsts, end_block))
        for found in ranges:
            self.hold(name, found.block_ids, HoldKind.LEASED)
        return ranges

    def hold(self, name: str, block_ids: Iterable[int], kind: HoldKind) -> None:
        """Protect blocks that are referenced already from reuse until `drop(name)`; later calls add to the hold."""
        block_ids = array("i", block_ids)
        assert all(map(self._pool.is_used, filter(None, block_ids))), "only blocks in use can be held without room"
        self._keep(name, block_ids, kind)

    def hold_cached(self, name: str, hashes: Sequence[bytes]) -> tuple[int, tuple[BlockRange, ...]]:
        """Lease a chain's longest cached prefix, if promises to others allow; returns its number of blocks and them."""
        match = longest_prefix(self._cache, self.layout, hashes, len(hashes))
        idle = sum(self._pool.num_idle(block_ids) for block_ids in match.block_ids)
        if match.num_blocks == 0 or idle > self.num_unpromised:
            return 0, ()
        ranges = [BlockRange(n, tuple(ids[n:])) for ids, n in zip(match.block_ids, match.num_dropped, strict=True)]
        for found in ranges:
            self._keep(name, array("i", found.block_ids), HoldKind.LEASED)
        return match.num_blocks, self._with_pages(ranges)

    def borrow(self, name: str, count: int, kind: HoldKind = HoldKind.TRANSFER) -> list[int]:
        """Returns up to `count` unpromised one-page blocks, held until `drop(name)`; none if the lease `name` ended."""
        if kind is HoldKind.LEASED and name not in self._holds:
            return []
        block_ids = self._pool.allocate(min(count, self.num_unpromised))
        self._holds.setdefault(name, _Hold(kind)).block_ids.extend(block_ids)
        return block_ids

    def drop(self, name: str) -> None:
        """End a hold; ending it again does nothing."""
        hold = self._holds.pop(name, None)
        if hold is not None:
            self._pool.release(hold.block_ids[::-1])

    def commit(self, owner: str, hashes: Sequence[bytes], num_computed_tokens: int) -> None:
        """Offer the owner's full, computed blocks to the prefix cache. `hashes` is its whole chain so far.

        Call it after every growth, before the next: only committed blocks may leave a group's window.
        """
        table = self._tables[owner]
        num_full = min(num_computed_tokens // self.layout.block_size, len(hashes))
        num_new = num_full - table.num_committed
        if num_new <= 0:
            return
        for index in range(table.num_committed, num_full):
            parent = hashes[index - 1] if index else None
            for group, blocks in enumerate(table.groups):
                if (block_id := blocks[index]) and index >= table.num_found[group]:
                    self._cache.insert(block_id, hashes[index], parent, group)
        for group, blocks in enumerate(table.groups):
            self._cache.note_stretches(hashes, blocks, group, table.num_committed, num_full)
        self._landed(owner, self._hashes_in_flight[owner][:num_new])
        self._hashes_in_flight[owner] = self._hashes_in_flight[owner][num_new:]
        table.num_committed = num_full

    def release(self, owner: str) -> None:
        """Release all blocks of `owner`. Committed ones stay cached until evicted, the end of the chain first."""
        table = self._tables.pop(owner)
        self._landed(owner, self._hashes_in_flight.pop(owner))
        self._owners_waiting.discard(owner)
        self._num_promised -= table.num_promised
        for blocks in table.groups:
            self._pool.release(blocks[::-1])

    def pages_of(self, groups: Sequence[Sequence[int]]) -> dict[int, tuple[int, ...]]:
        """Pages by block id, of those blocks that have several. `groups`: block ids by KV group, used or null."""
        several = (ids for ids, size in zip(groups, self._pages_per_block, strict=True) if size > 1)
        return {block_id: self._pool.pages_of(block_id) for ids in several for block_id in ids if block_id}

    def check(self) -> None:
        """Check the module's invariant.

        Raises:
            AssertionError: naming what is wrong.
        """
        references = Counter(
            block_id for table in self._tables.values() for blocks in table.groups for block_id in blocks if block_id
        )
        references.update(block_id for hold in self._holds.values() for block_id in hold.block_ids)
        references.update(self.pinned.blocks.read_block_ids)
        self._pool.check(references)
        self.pinned.blocks.check()
        assert self._num_promised == sum(table.num_promised for table in self._tables.values())
        for owner, table in self._tables.items():
            num_held = [sum(map(bool, blocks)) for blocks in table.groups]
            assert table.num_held == num_held, f"{owner} holds {num_held} blocks; {table.num_held} are counted"
        for counter in (self._in_flight, self._coming):
            owners = [owner for owner in self._hashes_in_flight if self._counted(owner) is counter]
            in_flight = Counter(block_hash for owner in owners for block_hash in self._hashes_in_flight[owner])
            assert in_flight == counter, "a block is thought to be in flight that nobody computes"

    def _tell(self, event: BlockEvent) -> None:
        if self._emit is not None and self.pinned.blocks.passed_on(event):
            self._emit(event)

    def _num_short(self, match: PrefixMatch, num_tokens: int) -> int:
        """Number of pages that an owner of `num_tokens` starting from `match` needs beyond the unpromised ones."""
        revived = sum(map(self._pool.num_idle, match.found))
        needed = self._needs.num_missing(match.num_blocks, match.num_held, num_tokens)
        left = self._watermark_pages if self._tables else 0
        return left + revived + self._num_promised + needed - self._pool.num_available

    def _yield(self, count: int, must: bool) -> bool:
        """Make pinned blocks evictable; returns whether any became so."""
        num_available = self._pool.num_available
        self.pinned.blocks.yield_blocks(count, must=must)
        return self._pool.num_available > num_available

    def _with_pages(self, ranges: Iterable[BlockRange]) -> tuple[BlockRange, ...]:
        """One range per group, with the pages of blocks that have several."""
        return tuple(
            found if size == 1 else replace(found, page_ids=tuple(chain(*map(self._pool.pages_of, found.block_ids))))
            for found, size in zip(ranges, self._pages_per_block, strict=True)
        )

    def _held(self, kind: HoldKind) -> set[int]:
        return {block_id for hold in self._holds.values() if hold.kind is kind for block_id in hold.block_ids}

    def _keep(self, name: str, block_ids: "array[int]", kind: HoldKind) -> None:
        if not block_ids:
            return
        self._pool.acquire(block_ids)
        hold = self._holds.setdefault(name, _Hold(kind))
        assert hold.kind is kind, f"{name} holds blocks as {hold.kind} already"
        hold.block_ids += block_ids

    def _drop_unseen(self, table: BlockTable, num_computed_tokens: int) -> None:
        for group, first in enumerate(self._needs.first_blocks(num_computed_tokens)):
            self._checkpoints.drop_before(table, group, first)

    def _renew_promise(self, table: BlockTable) -> None:
        num_promised = self._needs.num_missing(table.num_blocks, table.num_needed, table.num_promised_tokens)
        self._num_promised += num_promised - table.num_promised
        table.num_promised = num_promised

    def _coming_to(self, owner: str, hashes: Sequence[bytes], first: int, end: int, to_start: bool) -> tuple[int, int]:
        table, coming = self._tables[owner], self._hashes_in_flight[owner]
        start = first - table.num_committed
        if not 0 <= start < len(coming) or coming[start] != hashes[first]:
            return 0, 0
        most = min(end - first, len(coming) - start)
        num_shared = bisect_left(range(most), True, key=lambda i: hashes[first + i] != coming[start + i])
        # NOTE: the owner has blocks of a bounded group only from what its own end sees on
        needed = self._needs.first_blocks((first + num_shared) * self.layout.block_size)
        is_usable = not to_start or all(map(ge, needed, table.num_dropped))
        return (num_shared, len(coming) - start) if is_usable else (0, 0)

    def _counted(self, owner: str) -> Counter[bytes]:
        return self._coming if owner in self._owners_waiting else self._in_flight

    def _landed(self, owner: str, hashes: Sequence[bytes]) -> None:
        counter = self._counted(owner)
        for block_hash in hashes:
            if counter[block_hash] <= 1:
                del counter[block_hash]
            else:
                counter[block_hash] -= 1
