"""Prefix cache: index of blocks by content hash, and search of the longest prefix that every KV group can serve.

Invariant: a hash maps to at most one block per group, and a block has at most one hash.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, takewhile
from operator import is_not
from typing import Protocol, cast

from tandem.core.events import BlockEventSink, BlockRemoved, BlockStored
from tandem.kvcache.spec import KVLayout

NULL_BLOCK = 0


class BlockLookup(Protocol):
    """Look-up of contents by hash: the interface needed to search a prefix."""

    def lookup(self, block_hash: bytes, group: int) -> int | None:
        """Returns the location of this content for this group, or None."""
        ...

    def leading(self, hashes: Iterable[bytes], group: int) -> list[int]:
        """Returns the locations of a chain's blocks for this group, up to the first that has none."""
        ...


class PrefixCache(Protocol):
    """Map from block hashes to block ids. The block pool owns references and eviction order."""

    def lookup(self, block_hash: bytes, group: int) -> int | None:
        """Returns the block that holds this content for this group, or None."""
        ...

    def leading(self, hashes: Iterable[bytes], group: int) -> list[int]:
        """Returns the blocks that hold the beginning of a chain for this group."""
        ...

    def insert(self, block_id: int, block_hash: bytes, parent_hash: bytes | None, group: int) -> bool:
        """Add a computed block. Returns False if another block holds its content already."""
        ...

    def holds(self, block_id: int) -> bool:
        """Whether this block is in the cache."""
        ...

    def group_of(self, block_id: int) -> int:
        """The KV group of a block in the cache."""
        ...

    def discard(self, block_id: int) -> None:
        """Remove a block whose memory is about to be reused."""
        ...


class HashPrefixCache:
    """Prefix cache with one dictionary per group. Emits a `BlockStored` or `BlockRemoved` event for each change."""

    def __init__(self, num_groups: int, emit: BlockEventSink | None = None) -> None:
        self._blocks: tuple[dict[bytes, int], ...] = tuple({} for _ in range(num_groups))
        self._keys: dict[int, tuple[bytes, int]] = {}
        self._emit = emit

    def lookup(self, block_hash: bytes, group: int) -> int | None:
        return self._blocks[group].get(block_hash)

    def leading(self, hashes: Iterable[bytes], group: int) -> list[int]:
        """NOTE: in C, since a long prompt has thousands of blocks that are all here."""
        found = map(self._blocks[group].get, hashes)
        return cast(list[int], list(takewhile(partial(is_not, None), found)))

    def insert(self, block_id: int, block_hash: bytes, parent_hash: bytes | None, group: int) -> bool:
        assert block_id not in self._keys, f"block {block_id} is already cached"
        if block_hash in self._blocks[group]:
            return False
        self._blocks[group][block_hash] = block_id
        self._keys[block_id] = (block_hash, group)
        if self._emit is not None:
            self._emit(BlockStored(block_hash, parent_hash, group))
        return True

    def holds(self, block_id: int) -> bool:
        return block_id in self._keys

    def group_of(self, block_id: int) -> int:
        return self._keys[block_id][1]

    def discard(self, block_id: int) -> None:
        block_hash, group = self._keys.pop(block_id)
        del self._blocks[group][block_hash]
        if self._emit is not None:
            self._emit(BlockRemoved(block_hash, group))


class NoPrefixCache:
    """Prefix cache that stores nothing, used for `prefix_caching=False`."""

    def lookup(self, block_hash: bytes, group: int) -> int | None:
        return None

    def leading(self, hashes: Iterable[bytes], group: int) -> list[int]:
        return []

    def insert(self, block_id: int, block_hash: bytes, parent_hash: bytes | None, group: int) -> bool:
        return False

    def holds(self, block_id: int) -> bool:
        return False

    def group_of(self, block_id: int) -> int:
        raise AssertionError(f"block {block_id} was never cached")

    def discard(self, block_id: int) -> None:
        raise AssertionError(f"block {block_id} was never cached")


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Longest cached prefix: its `num_blocks` leading blocks are available in every group.

    `block_ids[group]` has `num_blocks` entries; the null block where the group's next query does not attend.
    """

    num_blocks: int
    block_ids: tuple[tuple[int, ...], ...]

    @property
    def num_held(self) -> list[int]:
        """Number of non-null blocks of each group."""
        return [len(block_ids) - block_ids.count(NULL_BLOCK) for block_ids in self.block_ids]

    @property
    def num_dropped(self) -> list[int]:
        """Number of leading null blocks of each group."""
        return [block_ids.count(NULL_BLOCK) for block_ids in self.block_ids]


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
    return PrefixMatch(num_blocks, tuple(search.block_ids(group, num_blocks) for group in range(len(layout.groups))))


class _Search:
    """Search in one chain, whose bound only falls: blocks that a group needs from the first on are looked up once."""

    def __init__(self, cache: BlockLookup, layout: KVLayout, hashes: Sequence[bytes]) -> None:
        self._cache = cache
        self._layout = layout
        self._hashes = hashes
        self._leading: dict[int, list[int]] = {}

    def num_served(self, group: int, limit: int) -> int:
        """Number of blocks of the longest prefix of at most `limit` that this group can serve."""
        if self._first_needed(group, limit) == 0:
            return min(limit, len(self._from_first(group, limit)))
        end = limit
        for index in range(limit - 1, -1, -1):
            if index < self._first_needed(group, end):
                return end
            if self._cache.lookup(self._hashes[index], group) is None:
                end = index
        return end

    def block_ids(self, group: int, num_blocks: int) -> tuple[int, ...]:
        """The group's blocks of a prefix that it can serve."""
        first = min(self._first_needed(group, num_blocks), num_blocks)
        if first == 0:
            found = self._from_first(group, num_blocks)[:num_blocks]
        else:
            found = self._cache.leading(self._hashes[first:num_blocks], group)
        assert len(found) == num_blocks - first, "a matched block vanished from the prefix cache"
        return (NULL_BLOCK,) * first + tuple(found)

    def _first_needed(self, group: int, num_blocks: int) -> int:
        return self._layout.first_needed(group, num_blocks * self._layout.block_size)

    def _from_first(self, group: int, limit: int) -> list[int]:
        if group not in self._leading:
            self._leading[group] = self._cache.leading(islice(self._hashes, limit), group)
        return self._leading[group]
