"""Decides leadership of one process from a Lease object and its own clock. Does no I/O, and never waits.

`leader` carries the decisions out. Invariant: a leader stops leading `renew_deadline_s` after it *sent* its last
successful renewal, and no other candidate takes the lease before it has seen it unchanged for `lease_s`, which is
longer. So there are never two leaders, provided that their clocks run at the same rate; their absolute times do not
matter.
"""

import math
from dataclasses import dataclass

from tandem.core.errors import ConfigurationError
from tandem.kube.lease import Lease


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTerms:
    """Durations of a leader lease, in seconds.

    Args:
        lease_s: a lease that is unchanged for this long may be taken over.
        renew_deadline_s: a holder without a renewal for this long stops leading.
        retry_s: interval at which to renew the lease, or to check whether it is free.
    """

    lease_s: float = 15.0
    renew_deadline_s: float = 10.0
    retry_s: float = 2.0

    def __post_init__(self) -> None:
        if not 0 < self.retry_s < self.renew_deadline_s < self.lease_s:
            raise ConfigurationError(
                f"a lease of {self.lease_s:g} s with retry_s={self.retry_s:g} and"
                f" renew_deadline_s={self.renew_deadline_s:g} could have two holders; use 0 < retry < deadline < lease"
            )


class Candidate:
    """A candidate for leadership. `identity` must be unique to this process: a restarted pod is another candidate."""

    def __init__(self, identity: str, terms: LeaseTerms) -> None:
        assert identity
        self.identity = identity
        self.terms = terms
        self._known: Lease | None = None
        self._known_since_s = 0.0
        self._leads_until_s = float("-inf")

    def remaining_s(self, now_s: float) -> float:
        """Seconds from now on for which this candidate is certain to lead; 0 = it does not lead."""
        return max(0.0, self._leads_until_s - now_s)

    def saw(self, lease: Lease, now_s: float) -> None:
        """Records the lease as the server has it. Another holder ends this candidate's leadership at once."""
        if lease != self._known:
            self._known, self._known_since_s = lease, now_s
        if lease.holder != self.identity:
            self.lost()

    def bid(self, now_s: float, wall_s: float) -> Lease | None:
        """The lease to write to keep or take leadership; None while another candidate holds it."""
        known = self._known
        assert known is not None, "look at the lease first"
        if known.holder == self.identity:
            return self._written(known, known.acquired_s, wall_s, known.num_transitions)
        # NOTE: its holder's own duration counts, should it have longer terms than we
        term_s = max(self.terms.lease_s, known.duration_s)
        if known.holder and now_s - self._known_since_s < term_s:
            return None
        return self._written(known, wall_s, wall_s, known.num_transitions + 1)

    def first_bid(self, name: str, wall_s: float) -> Lease:
        """The lease to create when there is none."""
        return self._written(Lease(name=name, holder="", duration_s=0), wall_s, wall_s, 0)

    def won(self, written: Lease, asked_s: float, now_s: float) -> None:
        """Records that the server accepted the bid sent at `asked_s`."""
        self._known, self._known_since_s = written, now_s
        self._leads_until_s = asked_s + self.terms.renew_deadline_s

    def lost(self) -> None:
        """Ends leadership at once."""
        self._leads_until_s = float("-inf")

    def resignation(self) -> Lease | None:
        """The lease to write so that a successor need not wait; None when this candidate does not hold it."""
        if self._known is None or self._known.holder != self.identity:
            return None
        return Lease(
            name=self._known.name,
            holder="",
            duration_s=1,
            num_transitions=self._known.num_transitions,
            resource_version=self._known.resource_version,
        )

    def _written(self, known: Lease, acquired_s: float | None, wall_s: float, num_transitions: int) -> Lease:
        return Lease(
            name=known.name,
            holder=self.identity,
            duration_s=math.ceil(self.terms.lease_s),
            acquired_s=acquired_s,
            renewed_s=wall_s,
            num_transitions=num_transitions,
            resource_version=known.resource_version,
        )
