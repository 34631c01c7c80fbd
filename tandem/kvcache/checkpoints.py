"""Checkpoints: constant states that stay findable after their request has gone on, so that others can go on from them.

Where a layer keeps one state and not one a token, only an end of a block at which it was written can be reused. Every
whole block whose state was written is findable while its request still sees it: so the end of an answer is found by the
chat's next turn, and a preempted request loses less than a block. What is kept beyond that `checkpoint_blocks` says,
and `Checkpoints.parting`.
Invariant: a checkpoint only takes a block that is promised to no request, so it never delays or preempts a request.
"""

from collections.abc import Iterable, Sequence

from tandem.kvcache.block_pool import BlockPool
from tandem.kvcache.block_table import BlockTable
from tandem.kvcache.prefix import NULL_BLOCK, PrefixCache
from tandem.kvcache.spec import KVLayout

_STRIDE = 1024  # tokens
_MOST_STRIDES = 8


def checkpoint_blocks(num_prompt_tokens: int, breakpoints: Iterable[int], block_size: int) -> frozenset[int]:
    """Indices of the blocks after which a prompt's constant states are kept.

    The last whole block that leaves a token to compute, for the same prompt and for one that continues it; the last
    whole block of each breakpoint; and at most eight between, at multiples of 1,024 tokens times a power of two. So
    prompts of any lengths that share a beginning have most of these in common.

    Args:
        breakpoints: lengths of beginnings that the caller named.
    """
    stride = _STRIDE
    while num_prompt_tokens > _MOST_STRIDES * stride:
        stride *= 2
    lengths = {num_prompt_tokens - 1, *range(stride, num_prompt_tokens, stride)}
    lengths.update(min(length, num_prompt_tokens) for length in breakpoints)
    return frozenset(length // block_size - 1 for length in lengths if length >= block_size)


class Checkpoints:
    """Checkpoints of one pool's owners."""

    def __init__(self, layout: KVLayout, pool: BlockPool, cache: PrefixCache) -> None:
        self._layout = layout
        self._pool = pool
        self._cache = cache
        specs = [group.spec for group in layout.groups]
        has_states = any(spec.bytes_per_request for spec in specs)
        self._growing = [index for index, spec in enumerate(specs) if has_states and not spec.is_bounded]

    def parting(self, hashes: Sequence[bytes], num_matched: int) -> frozenset[int]:
        """Index of the last block that a prompt shares with another one, if it is beyond the `num_matched` blocks from
        whose states it goes on. Layers that keep every token have it, and others will part there too.
        """
        shared = (self._cache.leading(hashes, group, num_matched, len(hashes)) for group in self._growing)
        num_more = min(map(len, shared), default=0)
        return frozenset({num_matched + num_more - 1} if num_more else ())

    def take(self, table: BlockTable, num_blocks_before: int, room: int) -> None:
        """Give a block to each group that has none at a checkpoint of `table` among the entries from
        `num_blocks_before` on; the last checkpoints first, as far as `room` pages suffice.
        """
        sizes = [group.pages_per_block for group in self._layout.groups]
        for index in sorted(table.checkpoints, reverse=True):
            if num_blocks_before <= index < table.num_blocks:
                groups = [group for group, blocks in enumerate(table.groups) if blocks[index] == NULL_BLOCK]
                num_pages = sum(sizes[group] for group in groups)
                if num_pages <= room:
                    room -= num_pages
                    for group in groups:
                        table.fill(group, index, *self._pool.allocate(1, sizes[group]))

    def drop_before(self, table: BlockTable, group: int, first: int) -> None:
        """Release the entries of `table` before `first`. A state that is no checkpoint cannot be found any more, unless
        others use it or its owner found it itself.
        """
        start, end = table.num_dropped[group], min(first, table.num_blocks)
        lasting = self._layout.publishable(group, start, max(start, end))
        if len(lasting) < end - start:
            for index in range(max(start, table.num_matched), end):
                block_id = table.groups[group][index]
                is_passing = block_id != NULL_BLOCK and index not in lasting and index not in table.checkpoints
                if is_passing and self._cache.holds(block_id) and not self._pool.is_wanted(block_id):
                    self._cache.discard(block_id)
        self._pool.release(table.drop_before(group, first))
