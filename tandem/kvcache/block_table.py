"""Block table: the blocks that hold one owner's (request's) tokens, per KV group: layers whose state has the same size
and lifetime. The null block stands where none is needed.
"""

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tandem.kvcache.prefix import NULL_BLOCK


@dataclass(frozen=True, slots=True)
class BlockRange:
    """Consecutive blocks of one KV group: `block_ids[i]` is entry `first_index + i` of the request's block table.

    Args:
        page_ids: where blocks have several pages, those of each in turn; else none.
    """

    first_index: int
    block_ids: tuple[int, ...]
    page_ids: tuple[int, ...] = ()

    def pages(self) -> Iterator[tuple[int, ...]]:
        """The pages of each block, in order."""
        size = len(self.page_ids) // max(1, len(self.block_ids))
        if not size:
            return ((block_id,) for block_id in self.block_ids)
        return (self.page_ids[start : start + size] for start in range(0, len(self.page_ids), size))


@dataclass(slots=True)
class BlockTable:
    """Block table of one owner. Entry `i` of `groups[g]` is for tokens `[i * block_size, (i + 1) * block_size)`.

    An entry is the null block once no query attends to its tokens any more, and from the start if the group stores
    nothing there. All have the same length and only grow, 32 bits an entry.

    Args:
        num_dropped: by group, leading entries that are null; at first no others are.
        checkpoints: indices of blocks whose constant states are kept for later requests if there is room.
        num_committed: leading blocks that have been offered to the prefix cache.
        num_promised: upper bound of the additional pages needed at once until `num_promised_tokens`, the tokens at
            admission, are computed.
        num_found: by group, leading entries that are null or were found in the prefix cache.
        num_held: by group, entries that are not null.
    """

    groups: tuple["array[int]", ...]
    num_dropped: list[int]
    num_promised_tokens: int = 0
    num_committed: int = 0
    num_promised: int = 0
    checkpoints: frozenset[int] = frozenset()
    num_found: list[int] = field(init=False)
    num_held: list[int] = field(init=False)
    _filled: set[tuple[int, int]] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        self.num_found = [len(blocks) for blocks in self.groups]
        self.num_held = [
            len(blocks) - num_dropped for blocks, num_dropped in zip(self.groups, self.num_dropped, strict=True)
        ]

    @property
    def num_blocks(self) -> int:
        """Number of entries in each group, null ones included."""
        return len(self.groups[0])

    @property
    def num_needed(self) -> list[int]:
        """Number of blocks of each group without those that are held for checkpoints only."""
        extra = Counter(group for group, _ in self._filled)
        return [held - extra[group] for group, held in enumerate(self.num_held)] if extra else self.num_held

    def fill(self, group: int, index: int, block_id: int) -> None:
        """Put a block at an entry for which the group itself needs none: a checkpoint."""
        self.groups[group][index] = block_id
        self.num_held[group] += 1
        self._filled.add((group, index))

    def drop_before(self, group: int, num_blocks: int) -> "array[int]":
        """Replace the entries before `num_blocks` by the null block; returns those that were real, last first."""
        blocks = self.groups[group]
        start, end = self.num_dropped[group], min(num_blocks, len(blocks))
        if end <= start:
            return array("i")
        dropped = blocks[start:end][::-1]
        blocks[start:end] = _nulls(end - start)
        self.num_dropped[group] = end
        self.num_held[group] -= len(dropped) - dropped.count(NULL_BLOCK)
        self._filled.difference_update([(group, index) for index in range(start, end)] if self._filled else ())
        return dropped

    def extend(self, group: int, end: int, entries: Sequence[int], block_ids: Sequence[int]) -> None:
        """Append entries up to `end`: `block_ids` at the indices `entries`, the null block elsewhere."""
        blocks = self.groups[group]
        if len(entries) == end - len(blocks):
            blocks.extend(block_ids)
        else:
            blocks.extend(_nulls(end - len(blocks)))
            for index, block_id in zip(entries, block_ids, strict=True):
                blocks[index] = block_id
        self.num_held[group] += len(block_ids)

    def skip_to(self, group: int, num_blocks: int) -> None:
        """Append null entries up to `num_blocks`, for tokens that no later query attends to."""
        blocks = self.groups[group]
        assert self.num_dropped[group] == len(blocks), "a real block lies before the entries to skip"
        blocks.extend(_nulls(num_blocks - len(blocks)))
        self.num_dropped[group] = num_blocks

    def ranges(self, first_indices: Sequence[int], end: int) -> tuple[BlockRange, ...]:
        """Returns, per group, the non-null blocks from its first index up to `end`."""
        return tuple(self._range(group, first, end) for group, first in enumerate(first_indices))

    def _range(self, group: int, first: int, end: int) -> BlockRange:
        blocks, start = self.groups[group], max(first, self.num_dropped[group])
        while start < min(end, len(blocks)) and blocks[start] == NULL_BLOCK:
            start += 1
        return BlockRange(start, tuple(blocks[start:end]))


def _nulls(count: int) -> "array[int]":
    return array("i", (NULL_BLOCK,)) * count
