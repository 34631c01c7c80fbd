"""Blocks of requests whose KV comes from another worker: of each group what the prefix cache lacks.

A request can start from a cached prefix only where all groups hold what its next query reads. Where the rest comes from
another worker, each group's blocks are of use by themselves: of a prompt that leaves another one in the middle, layers
that keep every token have the common part, although windowed and recurrent layers have nothing there.
"""

from array import array
from collections.abc import Sequence
from dataclasses import replace

from tandem.kvcache.block_pool import BlockPool
from tandem.kvcache.block_table import BlockTable
from tandem.kvcache.prefix import CachedRun, PrefixCache, PrefixMatch
from tandem.kvcache.spec import KVLayout


class ArrivingBlocks:
    """Finds cached blocks of each group, and extends block tables by them and by new ones for what comes."""

    def __init__(self, layout: KVLayout, pool: BlockPool, cache: PrefixCache) -> None:
        self._layout = layout
        self._growing = [group for group, found in enumerate(layout.groups) if not found.spec.is_bounded]
        self._pool = pool
        self._cache = cache

    def completed(
        self, match: PrefixMatch, hashes: Sequence[bytes], num_tokens: int, next_position: int
    ) -> PrefixMatch:
        """Returns a match with `more`: cached blocks of its chain's first `num_tokens` tokens. Of all blocks only those
        stay to which the query at `next_position` attends, without the block that it will write.

        NOTE: a matched block that the query does not need would be given back at once. If others use it, that would
        free nothing, so it must not count as one that the request has.
        """
        num_blocks = self._layout.num_blocks(num_tokens)
        hashes = hashes[: next_position // self._layout.block_size]
        groups = range(len(self._layout.groups))
        firsts = [min(self._layout.first_needed(group, next_position), num_blocks) for group in groups]
        kept = [_without(*each) for each in zip(match.block_ids, match.num_dropped, firsts, strict=True)]
        more = tuple(self._run(group, max(match.num_blocks, firsts[group]), hashes, num_blocks) for group in groups)
        ends = [more[group].first + len(more[group].block_ids) for group in self._growing]
        return replace(
            match,
            block_ids=tuple(block_ids for block_ids, _ in kept),
            num_dropped=tuple(num_dropped for _, num_dropped in kept),
            num_leading=min(ends, default=match.num_blocks),
            more=more,
        )

    def extend(self, table: BlockTable, more: Sequence[CachedRun], firsts: Sequence[int], num_blocks: int) -> list[int]:
        """Extends a table to `num_blocks` entries; returns, by group, the first entry to fill. `firsts`: by group, the
        first entry that is needed; those before it stay null.
        """
        for group, first in enumerate(firsts):
            if first > len(table.groups[group]):
                table.skip_to(group, min(first, num_blocks))
        for group, run in enumerate(more):
            if run.block_ids:
                end = run.first + len(run.block_ids)
                self._pool.acquire(run.block_ids)
                table.extend(group, end, range(run.first, end), run.block_ids)
                table.num_found[group] = end
        # NOTE: after all cached blocks were taken, since new ones evict others
        starts = [len(blocks) for blocks in table.groups]
        for group, start in enumerate(starts):
            entries = self._layout.stored(group, start, num_blocks)
            size = self._layout.groups[group].pages_per_block
            table.extend(group, num_blocks, entries, self._pool.allocate(len(entries), size))
        return starts

    def _run(self, group: int, start: int, hashes: Sequence[bytes], num_blocks: int) -> CachedRun:
        entries = self._layout.stored(group, start, num_blocks)
        if not entries:
            return CachedRun(num_blocks, array("i"))
        first, last = entries[0], entries[-1]
        end = last + 1 if last - first == len(entries) - 1 else first + 1
        return CachedRun(first, self._cache.leading(hashes, group, first, min(end, len(hashes))))


def _without(block_ids: "array[int]", num_dropped: int, first: int) -> tuple["array[int]", int]:
    """A group's matched blocks without those before `first`, and the number of leading null ones."""
    end = min(first, len(block_ids))
    if end <= num_dropped:
        return block_ids, num_dropped
    return array("i", bytes(end * block_ids.itemsize)) + block_ids[end:], end
