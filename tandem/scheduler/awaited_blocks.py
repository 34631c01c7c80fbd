"""Finds waiting requests that gain by waiting for blocks of another request, and names these blocks.

Invariant: whoever is waited for goes on whatever the waiter does: it runs, or it has all its blocks and gets their KV
from a worker elsewhere. So nobody waits whom such a worker may wait for: who is under lease, or has one there.
"""

from tandem.kvcache.manager import KVCacheManager
from tandem.kvcache.prefix import PrefixMatch
from tandem.scheduler.request import Request


class AwaitedBlocks:
    """One step's. What a request waits for from elsewhere it keeps itself, for later steps."""

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self._computing: set[tuple[int, bytes]] = set()  # (index, hash) of blocks that running requests compute

    def still_waits(self, request: Request) -> bool:
        """Whether that is known without a search for its prefix."""
        if request.awaited_hash is not None and self._kv.is_coming(request.awaited_hash):
            return True
        hashes = request.block_hashes
        return not request.needs_whole_prompt and any(
            index < len(hashes) and hashes[index] == block_hash for index, block_hash in self._computing
        )

    def waits(self, request: Request, match: PrefixMatch) -> bool:
        """Whether it is better off so than if it started from `match`, its prefix, now."""
        request.awaited_hash = None
        reusable = request.block_hashes[: (request.num_tokens - 1) // self._kv.layout.block_size]
        if request.needs_whole_prompt or match.num_blocks >= len(reusable):
            return False
        next_hash = reusable[match.num_blocks]
        if self._kv.is_being_computed(next_hash):
            self._computing.add((match.num_blocks, next_hash))
            return True
        num_awaited = self._num_awaited(request, match.num_blocks, reusable)
        if num_awaited:
            request.awaited_hash = reusable[num_awaited - 1]
        return num_awaited > 0

    def _num_awaited(self, request: Request, num_held: int, reusable: list[bytes]) -> int:
        """Leading blocks that will be here when those it waits for have come from elsewhere; 0 = it waits for none."""
        if request.handoff.lease_id is not None:
            return 0
        block_size = self._kv.layout.block_size
        first = max(num_held, 0 if request.is_computed_elsewhere else request.num_expected_tokens // block_size)
        num_shared, num_coming = self._kv.coming(reusable, first)
        if request.is_computed_elsewhere:
            is_better = not request.is_offered
        else:
            # NOTE: who shares little with a long prompt would be done before that, which may wait itself, has begun
            is_much = 2 * num_shared * block_size >= min(num_coming * block_size, self._kv.max_chunk_tokens)
            is_better = is_much and num_shared * block_size > request.num_tokens - (first + num_shared) * block_size
        return first + num_shared if num_shared and is_better else 0
