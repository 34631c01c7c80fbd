"""Pure arithmetic of what requests need: entries of their block tables for which blocks are allocated, and
their pages.
"""

import math
from collections.abc import Sequence

from tandem.kvcache.spec import KVLayout


class Needs:
    """Needs of requests whose cursors move by at most `max_chunk_tokens` at once. Lists have one element per KV
    group.
    """

    def __init__(self, layout: KVLayout, max_chunk_tokens: int) -> None:
        self._layout = layout
        self._max_chunk_tokens = max_chunk_tokens
        self._groups = range(len(layout.groups))
        self._sizes = [group.pages_per_block for group in layout.groups]

    def first_blocks(self, position: int) -> list[int]:
        """The first block that the query at `position` attends to."""
        return [self._layout.first_needed(group, position) for group in self._groups]

    def entries(self, num_blocks: int, end: int) -> list[Sequence[int]]:
        """The entries that need a block when a table of `num_blocks` entries grows to `end` entries."""
        return [self._layout.stored(group, num_blocks, end) for group in self._groups]

    def num_pages(self, entries: Sequence[Sequence[int]]) -> int:
        """Number of pages of blocks for these entries, in all groups."""
        return sum(len(indices) * size for indices, size in zip(entries, self._sizes, strict=True))

    def num_missing(self, num_blocks: int, num_held: Sequence[int], num_tokens: int) -> int:
        """Upper bound of the additional pages that a request needs at once until `num_tokens` are computed. It has
        `num_blocks` entries per group, `num_held` of them not null.
        """
        num_coming = max(0, math.ceil(num_tokens / self._layout.block_size) - num_blocks)
        if num_coming == 0:
            return 0
        limits = (self._layout.blocks_for_group(group, num_tokens, self._max_chunk_tokens) for group in self._groups)
        counts = zip(limits, num_held, self._sizes, strict=True)
        return sum(min(num_coming * size, max(0, limit - held * size)) for limit, held, size in counts)
