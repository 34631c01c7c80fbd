"""Finds requests that should wait for blocks that another request is computing or fetching, instead of starting now.

Invariant: a request only waits for one whose progress does not depend on it: one that runs, or one that owns all its
blocks and receives their KV from another worker. A request whose own blocks are leased, or whose KV another worker
already offers under a lease, does not wait for arriving KV, since that worker may wait for it. So waits form no cycle.
"""

from tandem.kvcache.manager import KVCacheManager
from tandem.kvcache.prefix import PrefixMatch
from tandem.scheduler.request import Request


class AwaitedBlocks:
    """Awaited blocks of one step. KV awaited from other workers outlives the step: see `Request.awaited_hash`."""

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self._computing: set[tuple[int, bytes]] = set()  # (index, hash) of blocks that running requests compute

    def still_waits(self, request: Request) -> bool:
        """Whether the request is known to wait still, without looking up its prefix."""
        if request.awaited_hash is not None and self._kv.is_coming(request.awaited_hash):
            return True
        hashes = request.block_hashes
        return not request.needs_whole_prompt and any(
            index < len(hashes) and hashes[index] == block_hash for index, block_hash in self._computing
        )

    def waits(self, request: Request, match: PrefixMatch) -> bool:
        """Whether the request should wait rather than start now from `match`, its prefix found. Sets `awaited_hash`."""
        request.awaited_hash = None
        num_reusable = min(len(request.block_hashes), (request.num_tokens - 1) // self._kv.layout.block_size)
        num_held = match.num_leading if request.is_computed_elsewhere else match.num_blocks
        if request.needs_whole_prompt or num_held >= num_reusable:
            return False
        next_hash = request.block_hashes[num_held]
        if self._kv.is_being_computed(next_hash):
            self._computing.add((num_held, next_hash))
            return True
        num_awaited = self._num_awaited(request, num_held, num_reusable)
        if num_awaited:
            request.awaited_hash = request.block_hashes[num_awaited - 1]
        return num_awaited > 0

    def _num_awaited(self, request: Request, num_held: int, num_reusable: int) -> int:
        """Number of leading blocks present once the awaited ones have arrived from other workers; 0: do not wait."""
        if request.handoff.lease_id is not None:
            return 0
        block_size = self._kv.layout.block_size
        first = max(num_held, 0 if request.is_computed_elsewhere else request.num_expected_tokens // block_size)
        to_start = not request.is_computed_elsewhere
        num_shared, num_coming = self._kv.coming(request.block_hashes, first, num_reusable, to_start=to_start)
        if request.is_computed_elsewhere:
            is_better = not request.is_offered
        else:
            # NOTE: a request that shares little with a long prompt would finish before that one, which may wait, begins
            is_much = 2 * num_shared * block_size >= min(num_coming * block_size, self._kv.max_chunk_tokens)
            is_better = is_much and num_shared * block_size > request.num_tokens - (first + num_shared) * block_size
        return first + num_shared if num_shared and is_better else 0
