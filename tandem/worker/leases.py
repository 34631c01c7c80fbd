"""Who may read our blocks, and until when. Knows no blocks: the engine holds those under the lease's name.

Invariant: while a lease is valid its hold is in place, without interruption since it was opened. So a reader whose
lease is confirmed after a read has read what it was promised. Used by one thread, the event loop's.
"""

from collections.abc import Callable, Iterable

from tandem.core.clock import Clock
from tandem.core.errors import CapacityError

MAX_LEASES = 65_536


class LeaseBook:
    """Leases by id.

    Args:
        ttl_s: a lease that is not renewed for so long ends.
        clock: says when that is.
        on_end: drops the hold of a lease that has ended; called once for each.
    """

    def __init__(self, ttl_s: float, clock: Clock, on_end: Callable[[str], None]) -> None:
        self.ttl_s = ttl_s
        self._clock = clock
        self._on_end = on_end
        self._ends_s: dict[str, float] = {}
        self.num_expired = 0

    def __len__(self) -> int:
        return len(self._ends_s)

    def open(self, lease_id: str) -> None:
        """Begin a lease.

        Raises:
            CapacityError: there are too many, or this id is taken.
        """
        if len(self._ends_s) >= MAX_LEASES or lease_id in self._ends_s:
            raise CapacityError(f"lease {lease_id!r} cannot be given: its id is taken or {MAX_LEASES} are open", 1.0)
        self._ends_s[lease_id] = self._clock.now_s() + self.ttl_s

    def is_valid(self, lease_id: str) -> bool:
        """Whether it has not ended; one whose time is over ends here."""
        ends_s = self._ends_s.get(lease_id)
        if ends_s is not None and ends_s <= self._clock.now_s():
            self._expire(lease_id)
            return False
        return ends_s is not None

    def renew(self, lease_ids: Iterable[str]) -> list[str]:
        """Prolong leases; returns those that have ended or never were."""
        invalid = []
        for lease_id in lease_ids:
            if self.is_valid(lease_id):
                self._ends_s[lease_id] = self._clock.now_s() + self.ttl_s
            else:
                invalid.append(lease_id)
        return invalid

    def end(self, lease_id: str) -> None:
        """End a lease now; ending it again does nothing."""
        if self._ends_s.pop(lease_id, None) is not None:
            self._on_end(lease_id)

    def expire(self) -> list[str]:
        """End those whose time is over; returns them."""
        now_s = self._clock.now_s()
        expired = [lease_id for lease_id, ends_s in self._ends_s.items() if ends_s <= now_s]
        for lease_id in expired:
            self._expire(lease_id)
        return expired

    def _expire(self, lease_id: str) -> None:
        self.num_expired += 1
        self.end(lease_id)
