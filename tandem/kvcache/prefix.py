"""Prefix cache: index of blocks by content hash, and search of the longest prefix that every KV group can serve.

Invariant: a hash maps to at most one block per group, and a block has at most one hash.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tandem.core.events import BlockEventSink, BlockRemoved, BlockStored
from tandem.kvcache.spec import KVLayout

NULL_BLOCK = 0


class BlockLookup(Protocol):
    """Look-up of contents by hash: the interface needed to search a prefix."""

    def lookup(self, block_hash: bytes, group: int) -> int | None:
        """Returns the location of this content for this group, or None."""
        ...


class PrefixCache(Protocol):
    """Map from block hashes to block ids. The block pool owns references and eviction order."""

    def lookup(self, block_hash: bytes, group: int) -> int | None:
        """Returns the block that holds this content for this group, or None."""
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
    num_blocks = min(len(hashes), max_blocks)
    agreed = False
    while not agreed:
        agreed = True
        for group in range(len(layout.groups)):
            served = _blocks_served(cache, layout, group, hashes, num_blocks)
            agreed = agreed and served == num_blocks
            num_blocks = served
    block_ids = tuple(_matched_ids(cache, layout, group, hashes[:num_blocks]) for group in range(len(layout.groups)))
    return PrefixMatch(num_blocks, block_ids)


def _blocks_served(cache: BlockLookup, layout: KVLayout, group: int, hashes: Sequence[bytes], limit: int) -> int:
    if layout.first_needed(group, limit * layout.block_size) == 0:
        for index in range(limit):
            if cache.lookup(hashes[index], group) is None:
                return index
        return limit
    end = limit
    for index in range(limit - 1, -1, -1):
        if index < layout.first_needed(group, end * layout.block_size):
            return end
        if cache.lookup(hashes[index], group) is None:
            end = index
    return end


def _matched_ids(cache: BlockLookup, layout: KVLayout, group: int, hashes: Sequence[bytes]) -> tuple[int, ...]:
    first = layout.first_needed(group, len(hashes) * layout.block_size)
    found = [cache.lookup(block_hash, group) for block_hash in hashes[first:]]
    assert None not in found, "a matched block vanished from the prefix cache"
    return (NULL_BLOCK,) * min(first, len(hashes)) + tuple(block for block in found if block is not None)
