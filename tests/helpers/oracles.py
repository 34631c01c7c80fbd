"""Oracle of block accounting, told naively: no reference counts, no free list, everything derived anew.

`BlockOracle` follows a `KVCacheManager` from outside: owners' tables, the events, and the order in which
blocks were let go.
"""

from collections import Counter
from collections.abc import Sequence

from tandem.core.events import BlockEvent, BlockRemoved
from tandem.kvcache.spec import KVLayout

Key = tuple[int, bytes]  # group, block hash


class BlockOracle:
    """`held` is what owners' tables say, `stored` what the events say can be found, `idle` the order of
    eviction; `offered` is the block that was last committed under a hash."""

    def __init__(self, layout: KVLayout, num_blocks: int) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.held: dict[str, list[list[int]]] = {}
        self.stored: dict[Key, int] = {}
        self.idle: list[int] = []
        self.offered: dict[Key, int] = {}
        self.events: list[BlockEvent] = []

    def referenced(self) -> Counter[int]:
        return Counter(b for groups in self.held.values() for blocks in groups for b in blocks if b != 0)

    def receive_all(self) -> None:
        """Take in the events that came since the last call."""
        for event in self.events:
            key = (event.group, event.block_hash)
            if isinstance(event, BlockRemoved):
                block_id = self.stored.pop(key)
                assert self.idle.pop(0) == block_id, "not the least recently used block was evicted"
            else:
                assert key not in self.stored, "a content was stored twice"
                self.stored[key] = self.offered[key]
        self.events.clear()

    def hold(self, owner: str, groups: Sequence[Sequence[int]]) -> None:
        """`owner` now holds exactly these. What it dropped was given back before anything was taken."""
        before = self.held.setdefault(owner, [[] for _ in groups])
        for index, blocks in enumerate(groups):
            num_before = len(before[index])
            dropped = [old for old, new in zip(before[index], blocks, strict=False) if old != new]
            before[index][:] = blocks[:num_before]
            self._let_go(dropped)
        self.receive_all()
        taken = [b for old, new in zip(before, groups, strict=True) for b in new[len(old) :] if b != 0]
        self.held[owner] = [list(blocks) for blocks in groups]
        self.idle = [b for b in self.idle if b not in taken]

    def release(self, owner: str) -> None:
        for blocks in self.held.pop(owner):
            self._let_go(blocks)

    def _let_go(self, blocks: Sequence[int]) -> None:
        still_held, findable = self.referenced(), self.stored.values()
        self.idle += [b for b in reversed(blocks) if b in findable and not still_held[b]]

    def longest_match(self, hashes: Sequence[bytes], num_tokens: int) -> int:
        """Leading blocks that every group can serve, by trying every length."""
        size = self.layout.block_size
        for length in range(min(len(hashes), (num_tokens - 1) // size), 0, -1):
            if all(
                (index, hashes[i]) in self.stored
                for index, group in enumerate(self.layout.groups)
                for i in range(length)
                if (i + 1) * size > group.spec.needed(length * size)
            ):
                return length
        return 0
