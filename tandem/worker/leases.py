"""Leases: time-limited rights of other workers to read this worker's blocks. The engine holds the blocks, so that they
are not reused, under the lease's id.

Invariant: while a lease is valid its hold is in place, without interruption since it was opened. So a reader whose
lease is confirmed after a read has read the promised content. Used by one thread, the event loop's.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from tandem.compute.ranked_pages import OPAQUE
from tandem.core.clock import Clock
from tandem.core.errors import CapacityError
from tandem.kvcache.block_table import BlockRange

MAX_LEASES = 65_536  # open at once


@dataclass(slots=True)
class _Lease:
    ends_s: float
    blocks: dict[int, tuple[int, tuple[int, ...]]] = field(default_factory=dict)  # by id: KV group and pages


class LeaseBook:
    """Leases by id: opens, renews and ends them, and knows the blocks of each.

    Args:
        ttl_s: time after which a lease that is not renewed ends.
        clock: time of renewals.
        on_end: releases the hold of a lease that has ended; called once for each.
    """

    def __init__(self, ttl_s: float, clock: Clock, on_end: Callable[[str], None]) -> None:
        self.ttl_s = ttl_s
        self._clock = clock
        self._on_end = on_end
        self._leases: dict[str, _Lease] = {}
        self.num_expired = 0

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def first_end_s(self) -> float:
        """Time at which the first of the open leases ends unless it is renewed; infinity if there are none."""
        return min((lease.ends_s for lease in self._leases.values()), default=math.inf)

    def open(self, lease_id: str) -> None:
        """Opens a lease, without blocks, for `ttl_s` from now.

        Raises:
            CapacityError: there are too many, or the id is in use.
        """
        if len(self._leases) >= MAX_LEASES or lease_id in self._leases:
            raise CapacityError(f"lease {lease_id!r} cannot be given: its id is taken or {MAX_LEASES} are open", 1.0)
        self._leases[lease_id] = _Lease(self._clock.now_s() + self.ttl_s)

    def grant(self, lease_id: str, groups: Sequence[BlockRange]) -> None:
        """Adds blocks of each KV group to a lease; no effect when it has ended."""
        if (lease := self._leases.get(lease_id)) is not None:
            for group, found in enumerate(groups):
                lease.blocks.update(zip(found.block_ids, ((group, pages) for pages in found.pages()), strict=True))

    def grant_pages(self, lease_id: str, page_ids: Iterable[int]) -> None:
        """Adds pages that are no blocks of KV to a lease; no effect when it has ended."""
        if (lease := self._leases.get(lease_id)) is not None:
            lease.blocks.update((page, (OPAQUE, (page,))) for page in page_ids)

    def covered(self, lease_id: str, block_ids: Iterable[int]) -> list[tuple[int, tuple[int, ...]]] | None:
        """(KV group, pages) of each of these blocks; None unless the lease permits reading all of them."""
        lease = self._leases.get(lease_id)
        if lease is None:
            return None
        found = [lease.blocks.get(block_id) for block_id in block_ids]
        return None if None in found else [block for block in found if block is not None]

    def is_valid(self, lease_id: str) -> bool:
        """Whether a lease has not ended; an expired one ends here."""
        lease = self._leases.get(lease_id)
        if lease is not None and lease.ends_s <= self._clock.now_s():
            self._expire(lease_id)
            return False
        return lease is not None

    def renew(self, lease_ids: Iterable[str]) -> list[str]:
        """Renews leases; returns those that have ended or never existed."""
        invalid = []
        for lease_id in lease_ids:
            if self.is_valid(lease_id):
                self._leases[lease_id].ends_s = self._clock.now_s() + self.ttl_s
            else:
                invalid.append(lease_id)
        return invalid

    def end(self, lease_id: str) -> None:
        """Ends a lease; no effect if repeated."""
        if self._leases.pop(lease_id, None) is not None:
            self._on_end(lease_id)

    def expire(self) -> list[str]:
        """Ends expired leases and returns them."""
        now_s = self._clock.now_s()
        expired = [lease_id for lease_id, lease in self._leases.items() if lease.ends_s <= now_s]
        for lease_id in expired:
            self._expire(lease_id)
        return expired

    def _expire(self, lease_id: str) -> None:
        self.num_expired += 1
        self.end(lease_id)
