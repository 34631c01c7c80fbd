"""Checkpoints: recurrent states that stay in the prefix cache after their request has moved on, for later requests.

A recurrent layer keeps one (*constant*) state instead of one a token. It can be reused only at the end of a block at
which it was written. While a request still sees a state, every whole block whose state was written can be found, so a
chat's next turn finds the end of the answer. `checkpoint_blocks` and `Checkpoints.divergence` choose which stay longer.
Invariant: a checkpoint only takes a block that is promised to no request, so it never delays or preempts a request.
"""

from collections.abc import Iterable, Sequence

from tandem.kvcache.block_pool import BlockPool
from tandem.kvcache.block_table import BlockTable
from tandem.kvcache.prefix import NULL_BLOCK, PrefixCache
from tandem.kvcache.spec import KVLayout

_STRIDE = 1024  # tokens
_MOST_STRIDES = 8  # beyond as many, the stride doubles


def checkpoint_blocks(num_prompt_tokens: int, breakpoints: Iterable[int], block_size: int) -> frozenset[int]:
    """Indices of the blocks of a prompt after which the recurrent states are kept.

    The last whole block that leaves a token to compute, for the same prompt and for one that continues it; the last
    whole block of each breakpoint; and at most eight between, at multiples of 1,024 tokens times a power of two. So
    prompts of any lengths that share a prefix have most of these in common.

    Args:
        breakpoints: lengths in tokens of prefixes that the client asked to keep (cache breakpoints).
    """
    stride = _STRIDE
    while num_prompt_tokens > _MOST_STRIDES * stride:
        stride *= 2
    lengths = {num_prompt_tokens - 1, *range(stride, num_prompt_tokens, stride)}
    lengths.update(min(length, num_prompt_tokens) for length in breakpoints)
    return frozenset(length // block_size - 1 for length in lengths if length >= block_size)


class Checkpoints:
    """Takes and releases the checkpoints of requests of one pool."""

    def __init__(self, layout: KVLayout, pool: BlockPool, cache: PrefixCache) -> None:
        self._layout = layout
        self._pool = pool
        self._cache = cache
        specs = [group.spec for group in layout.groups]
        has_states = any(spec.bytes_per_request for spec in specs)
        self._growing = [index for index, spec in enumerate(specs) if has_states and not spec.is_bounded]

    def divergence(self, hashes: Sequence[bytes], num_matched: int) -> frozenset[int]:
        """Index of the last block that a prompt shares with a cached one, if that is beyond the `num_matched` blocks
        whose states are cached: other prompts will probably diverge there too. Found by the layers that keep every
        token.
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
        """Release the entries of `table` before `first`. A state that is no checkpoint leaves the prefix cache, unless
        others use it or its owner found it there.
        """
        start, end = table.num_dropped[group], min(first, table.num_blocks)
        lasting = self._layout.publishable(group, start, max(start, end))
        if len(lasting) < end - start:
            for index in range(max(start, table.num_found[group]), end):
                block_id = table.groups[group][index]
                is_passing = block_id != NULL_BLOCK and index not in lasting and index not in table.checkpoints
                if is_passing and self._cache.holds(block_id) and not self._pool.is_wanted(block_id):
                    self._cache.discard(block_id)
        self._pool.release(table.drop_before(group, first))
