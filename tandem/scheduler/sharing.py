"""Blocks held longer than their request needs them, for others: reservations and leases for KV transfers, and pins.

A *reservation* holds blocks that a transfer writes; a *lease* holds blocks that another worker reads; a pin keeps a
prefix in the cache for later requests until its deadline. Invariant: a reserved block is held until its transfer is
over, a leased one until its lease ends, whatever becomes of the request. The caller ends either by
`KVCacheManager.drop`, with the id that the event names.
"""

from collections.abc import Sequence

from tandem.kvcache.block_table import BlockRange
from tandem.kvcache.manager import HoldKind, KVCacheManager
from tandem.kvcache.prefix import CachedRun
from tandem.scheduler.output import KVComputed, KVEvent, KVReserved
from tandem.scheduler.request import Request


class KVSharing:
    """The scheduler's reservations, leases and pins, independent of the transport."""

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self._events: list[KVEvent] = []
        self._num_fetches = 0

    def reserve(self, request: Request, num_held_tokens: int, more: Sequence[CachedRun]) -> None:
        """Allocate and hold all blocks of the KV that a newly admitted request expects. KV of the first
        `num_held_tokens` tokens was found in the prefix cache, and `more` of it in some groups.
        """
        expected = request.num_expected_tokens
        next_position = min(expected, request.num_tokens - 1)
        groups = self._kv.reserve(request.request_id, expected, next_position, more)
        fetch_id = self._tell_reserved(request, num_held_tokens, groups)
        for group in groups:
            self._kv.hold(fetch_id, group.block_ids, HoldKind.TRANSFER)

    def reserve_nothing(self, request: Request, num_held_tokens: int) -> None:
        """Emit the event that all KV a request expects is present already."""
        self._tell_reserved(request, num_held_tokens, tuple(BlockRange(0, ()) for _ in self._kv.layout.groups))

    def note_computed(self, request: Request) -> None:
        """Grant the pins that the cursor has passed and lease complete blocks. Call after blocks were committed."""
        if request.pins:
            self._grant_pins(request)
        if request.handoff.lease_id is not None:
            self._lease_computed(request, request.handoff.lease_id)

    def _grant_pins(self, request: Request) -> None:
        """NOTE: grants a pin as soon as its last token is computed, before a windowed group drops earlier blocks."""
        block_size = self._kv.layout.block_size
        for index, pin in enumerate(request.pins):
            num_blocks = min(pin.num_tokens, request.num_prompt_tokens) // block_size
            if index not in request.num_pinned_tokens and num_blocks * block_size <= request.num_computed_tokens:
                num_granted = self._kv.pinned.pin(request.block_hashes[:num_blocks], pin.ttl_s)
                request.num_pinned_tokens[index] = num_granted * block_size

    def _lease_computed(self, request: Request, lease_id: str) -> None:
        """Lease the blocks that have become full, and the last, partial one once all tokens are computed."""
        block_size = self._kv.layout.block_size
        is_last = request.num_pending_tokens == 0
        first, end = request.num_leased_blocks, (request.num_computed_tokens + is_last * (block_size - 1)) // block_size
        if end <= first:
            return
        groups = self._kv.lease(request.request_id, request.num_tokens, first, end, lease_id)
        request.num_leased_blocks = end
        num_tokens = request.num_tokens if is_last else end * block_size
        self._events.append(KVComputed(request.request_id, lease_id, num_tokens, groups, is_last))

    def _tell_reserved(self, request: Request, num_held_tokens: int, groups: tuple[BlockRange, ...]) -> str:
        self._num_fetches += 1
        fetch_id, expected = f"fetch {self._num_fetches}", request.num_expected_tokens
        self._events.append(KVReserved(request.request_id, fetch_id, num_held_tokens, expected, groups))
        return fetch_id

    def take_kv_events(self) -> list[KVEvent]:
        """Returns the events of reserved and of leased blocks since the last call, in order."""
        events, self._events = self._events, []
        return events
