"""Prefix cache: index of blocks by content hash, and search of the longest prefix that every KV group can serve.

A *chain* is the hashes of consecutive blocks from a prompt's first on, each of which covers all tokens before it.
Invariant: a hash maps to at most one block per group, and a block has at most one hash.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile, zip_longest
from operator import is_not
from typing import Protocol, cast

from tandem.core.events import BlockEventSink, BlockRemoved, BlockStored
from tandem.kvcache.spec import KVLayout

NULL_BLOCK = 0  # id of the block that belongs to no request
STRETCH_BLOCKS = 32  # of a chain that are found by one look-up
_is_there = partial(is_not, None)


class BlockLookup(Protocol):
    """Look-up of contents by hash: the interface needed to search a prefix."""

    def lookup(self, block_hash: bytes, group: int) -> int | None:
        """Returns the location of this content for this group, or None."""
        ...

    def leading(self, hashes: Sequence[bytes], group: int, first: int, end: int) -> "array[int]":
        """Returns the locations of a chain's blocks `[first, end)` for this group, up to the first that has none."""
        ...


class PrefixCache(Protocol):
    """Map from block hashes to block ids. The block pool owns references and eviction order.

    Args:
        groups: by block id, one more than the KV group of a block in the cache; 0 = it is not there. 16 bits each.
    """

    groups: "array[int]"

    def lookup(self, block_hash: bytes, group: int) -> int | None:
        """Returns the block that holds this content for this group, or None."""
        ...

    def leading(self, hashes: Sequence[bytes], group: int, first: int, end: int) -> "array[int]":
        """Returns the blocks of a chain from `first` on, up to `end` or the first that is missing for this group."""
        ...

    def insert(self, block_id: int, block_hash: bytes, parent_hash: bytes | None, group: int) -> bool:
        """Add a computed block. Returns False if another block holds its content already."""
        ...

    def holds(self, block_id: int) -> bool:
        """Whether this block is in the cache."""
        ...

    def note_stretches(
        self, hashes: Sequence[bytes], block_ids: "array[int]", group: int, first: int, end: int
    ) -> None:
        """Record that blocks `[first, end)` of a chain were inserted; its owner has `block_ids`. Stretches of
        `STRETCH_BLOCKS` blocks that are complete now can then be found with one look-up each.
        """
        ...

    def discard(self, block_id: int) -> None:
        """Remove a block whose memory is about to be reused."""
        ...

    def check(self) -> None:
        """Check the invariants.

        Raises:
            AssertionError: naming what is wrong.
        """
        ...


class HashPrefixCache:
    """Prefix cache with one dictionary per group. Emits a `BlockStored` or `BlockRemoved` event for each change.

    A stretch is `STRETCH_BLOCKS` blocks of a chain, the first at a multiple of that many, found by the hash of its last
    block. It is forgotten as soon as one of its blocks is discarded. A block is in one stretch at most: where chains
    part within a stretch, the first one has it, and the others are searched block by block there.
    """

    def __init__(
        self,
        num_groups: int,
        num_blocks: int,
        emit: BlockEventSink | None = None,
        stretch_blocks: int = STRETCH_BLOCKS,
    ) -> None:
        self.groups = array("h", bytes(2 * (num_blocks + 1)))
        self._blocks: tuple[dict[bytes, int], ...] = tuple({} for _ in range(num_groups))
        self._keys: dict[int, tuple[bytes, int]] = {}
        self._stretches: tuple[dict[bytes, array[int]], ...] = tuple({} for _ in range(num_groups))
        self._stretch_ends = array("i", bytes(4 * (num_blocks + 1)))  # by block the last of its stretch; 0 = none
        self._stretch_blocks = stretch_blocks
        self._emit = emit

    def lookup(self, block_hash: bytes, group: int) -> int | None:
        return self._blocks[group].get(block_hash)

    def leading(self, hashes: Sequence[bytes], group: int, first: int, end: int) -> "array[int]":
        """NOTE: in C, since a long prompt has thousands of blocks that are all here."""
        size, get, found = self._stretch_blocks, self._blocks[group].get, array("i")
        while first < end:
            if first % size == 0:
                last_hashes = map(hashes.__getitem__, range(first + size - 1, end, size))
                stretches = map(self._stretches[group].get, last_hashes)
                many = b"".join(takewhile(_is_there, cast("map[array[int]]", stretches)))
                found.frombytes(many)
                first += len(many) // found.itemsize
            stop = min(end, (first // size + 1) * size)
            more = array("i", takewhile(_is_there, cast("map[int]", map(get, hashes[first:stop]))))
            found.extend(more)
            if len(more) < stop - first:
                return found
            first = stop
        return found

    def insert(self, block_id: int, block_hash: bytes, parent_hash: bytes | None, group: int) -> bool:
        assert not self.groups[block_id], f"block {block_id} is already cached"
        if block_hash in self._blocks[group]:
            return False
        self._blocks[group][block_hash] = block_id
        self._keys[block_id] = (block_hash, group)
        self.groups[block_id] = group + 1
        if self._emit is not None:
            self._emit(BlockStored(block_hash, parent_hash, group))
        return True

    def note_stretches(
        self, hashes: Sequence[bytes], block_ids: "array[int]", group: int, first: int, end: int
    ) -> None:
        size, stretch_ends = self._stretch_blocks, self._stretch_ends
        for stop in range((first // size + 1) * size, end + 1, size):
            found = block_ids[stop - size : stop]
            if not all(map(self.groups.__getitem__, found)):  # NOTE: others have some of these contents
                blocks = map(self._blocks[group].get, hashes[stop - size : stop])
                found = array("i", takewhile(_is_there, cast("map[int]", blocks)))
            if len(found) == size and not any(map(stretch_ends.__getitem__, found)):
                self._stretches[group][hashes[stop - 1]] = found
                last_id = found[-1]
                for block_id in found:
                    stretch_ends[block_id] = last_id

    def holds(self, block_id: int) -> bool:
        return self.groups[block_id] != 0

    def discard(self, block_id: int) -> None:
        block_hash, group = self._keys[block_id]
        if last_id := self._stretch_ends[block_id]:
            for other in self._stretches[group].pop(self._keys[last_id][0]):
                self._stretch_ends[other] = 0
        del self._keys[block_id], self._blocks[group][block_hash]
        self.groups[block_id] = 0
        if self._emit is not None:
            self._emit(BlockRemoved(block_hash, group))

    def check(self) -> None:
        expected = {block_id: group + 1 for block_id, (_, group) in self._keys.items()}
        assert expected == {block_id: number for block_id, number in enumerate(self.groups) if number}
        stretch_ends = array("i", bytes(4 * len(self.groups)))
        for group, stretches in enumerate(self._stretches):
            for last_hash, block_ids in stretches.items():
                keys = [self._keys.get(block_id) for block_id in block_ids]
                assert all(key is not None and key[1] == group for key in keys), "a stretch has a block that is gone"
                assert keys[-1] == (last_hash, group), "a stretch ends with another block"
                for block_id in block_ids:
                    assert not stretch_ends[block_id], "two stretches have a block"
                    stretch_ends[block_id] = block_ids[-1]
        assert stretch_ends == self._stretch_ends, "a block is thought to be in another stretch"


class NoPrefixCache:
    """Prefix cache that stores nothing, used for `prefix_caching=False`."""

    def __init__(self, num_blocks: int) -> None:
        self.groups = array("h", bytes(2 * (num_blocks + 1)))

    def lookup(self, block_hash: bytes, group: int) -> int | None:
        return None

    def leading(self, hashes: Sequence[bytes], group: int, first: int, end: int) -> "array[int]":
        return array("i")

    def insert(self, block_id: int, block_hash: bytes, parent_hash: bytes | None, group: int) -> bool:
        return False

    def note_stretches(
        self, hashes: Sequence[bytes], block_ids: "array[int]", group: int, first: int, end: int
    ) -> None:
        pass

    def holds(self, block_id: int) -> bool:
        return False

    def discard(self, block_id: int) -> None:
        raise AssertionError(f"block {block_id} was never cached")

    def check(self) -> None:
        assert not any(self.groups), "a block is cached"


@dataclass(frozen=True, slots=True)
class CachedRun:
    """Cached blocks of one group: `block_ids`, 32 bits each, are those of consecutive entries from `first` on."""

    first: int
    block_ids: "array[int]"


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Longest cached prefix: its `num_blocks` leading blocks are available in every group.
    `block_ids[group]` has `num_blocks` entries, 32 bits each. The first `num_dropped[group]` are the null block: the
    group's next query does not attend there.

    Args:
        num_leading: leading blocks that all growing groups have, which keep every token; counted if `more` is.
        more: by group, blocks after the matched ones that are of use if all that is missing comes from another worker;
            empty if nothing comes.
    """

    num_blocks: int
    block_ids: tuple["array[int]", ...]
    num_dropped: tuple[int, ...]
    num_leading: int
    more: tuple[CachedRun, ...] = ()

    @property
    def num_held(self) -> list[int]:
        """Number of non-null blocks of each group, `more` included."""
        num_more = (len(run.block_ids) for run in self.more)
        counts = zip_longest(self.num_dropped, num_more, fillvalue=0)
        return [self.num_blocks - num_dropped + count for num_dropped, count in counts]

    @property
    def found(self) -> list["array[int]"]:
        """All blocks found, null ones included."""
        return [*self.block_ids, *(run.block_ids for run in self.more)]


def longest_prefix(cache: BlockLookup, layout: KVLayout, hashes: Sequence[bytes], max_blocks: int) -> PrefixMatch:
    """Returns the longest prefix of the chain that all groups can serve, of at most `max_blocks` blocks.

    A group only needs the blocks that its next query attends to, so a bounded one can serve a prefix whose beginning
    it has dropped. Each group lowers the bound of the others until all agree.
    """
    search, num_blocks = _Search(cache, layout, hashes), min(len(hashes), max_blocks)
    agreed = False
    while not agreed:
        agreed = True
        for group in range(len(layout.groups)):
            served = search.num_served(group, num_blocks)
            agreed = agreed and served == num_blocks
            num_blocks = served
    firsts = tuple(search.first_needed(group, num_blocks) for group in range(len(layout.groups)))
    block_ids = tuple(search.block_ids(*each, num_blocks) for each in enumerate(firsts))
    return PrefixMatch(num_blocks, block_ids, firsts, num_blocks)


class _Search:
    """Search in one chain. Its bound only falls, so blocks that a group needs from the first on are looked up once."""

    def __init__(self, cache: BlockLookup, layout: KVLayout, hashes: Sequence[bytes]) -> None:
        self._cache = cache
        self._layout = layout
        self._hashes = hashes
        self._leading: dict[int, array[int]] = {}

    def num_served(self, group: int, limit: int) -> int:
        """Number of blocks of the longest prefix of at most `limit` that this group can serve."""
        if self.first_needed(group, limit) == 0:
            return min(limit, len(self._from_first(group, limit)))
        end = limit
        for index in range(limit - 1, -1, -1):
            if index < self.first_needed(group, end):
                return end
            if self._cache.lookup(self._hashes[index], group) is None:
                end = index
        return end

    def block_ids(self, group: int, first: int, num_blocks: int) -> "array[int]":
        """The group's blocks for a prefix that it can serve; null before `first`."""
        if first == 0:
            found = self._from_first(group, num_blocks)[:num_blocks]
        else:
            found = self._cache.leading(self._hashes, group, first, num_blocks)
        assert len(found) == num_blocks - first, "a matched block vanished from the prefix cache"
        return array("i", bytes(first * found.itemsize)) + found

    def first_needed(self, group: int, num_blocks: int) -> int:
        """The first of `num_blocks` blocks that the next query attends to."""
        return min(self._layout.first_needed(group, num_blocks * self._layout.block_size), num_blocks)

    def _from_first(self, group: int, limit: int) -> "array[int]":
        if group not in self._leading:
            self._leading[group] = self._cache.leading(self._hashes, group, 0, limit)
        return self._leading[group]
