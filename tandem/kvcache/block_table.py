"""Which blocks hold one owner's tokens, per KV group."""

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.kvcache.prefix import NULL_BLOCK


@dataclass(frozen=True, slots=True)
class BlockRange:
    """Blocks of one KV group: entry `i` of `block_ids` is entry `first_index + i` of the request's block table."""

    first_index: int
    block_ids: tuple[int, ...]


@dataclass(slots=True)
class BlockTable:
    """Entry `i` of `groups[g]` holds tokens `[i * block_size, (i + 1) * block_size)`, or is the null block once those
    tokens have left the group's window. All lists have the same length and only grow; `num_dropped[g]` leading entries
    are null.

    `num_committed` leading blocks have been offered to the prefix cache. `num_promised` more blocks, at most, will be
    needed at once until `num_promised_tokens`, those the owner was admitted with, are computed.
    """

    groups: tuple[list[int], ...]
    num_dropped: list[int]
    num_promised_tokens: int = 0
    num_committed: int = 0
    num_promised: int = 0

    @property
    def num_blocks(self) -> int:
        """Entries of every group, null ones included."""
        return len(self.groups[0])

    def drop_before(self, group: int, num_blocks: int) -> list[int]:
        """Replace the entries before `num_blocks` by the null block; returns those that were real, last first."""
        blocks = self.groups[group]
        start, end = self.num_dropped[group], min(num_blocks, len(blocks))
        if end <= start:
            return []
        dropped = blocks[start:end][::-1]
        blocks[start:end] = [NULL_BLOCK] * (end - start)
        self.num_dropped[group] = end
        return dropped

    def skip_to(self, group: int, num_blocks: int) -> None:
        """Append null entries up to `num_blocks`: tokens before them are in no later query's window."""
        blocks = self.groups[group]
        assert self.num_dropped[group] == len(blocks), "a real block lies before the entries to skip"
        blocks.extend([NULL_BLOCK] * (num_blocks - len(blocks)))
        self.num_dropped[group] = num_blocks

    def ranges(self, first_indices: Sequence[int], end: int) -> tuple[BlockRange, ...]:
        """Per group, the real blocks from its first index up to `end`."""
        starts = [max(pair) for pair in zip(first_indices, self.num_dropped, strict=True)]
        return tuple(
            BlockRange(start, tuple(blocks[start:end])) for start, blocks in zip(starts, self.groups, strict=True)
        )
