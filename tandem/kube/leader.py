"""Leader election among several processes by a Lease in the Kubernetes API; carries out the decisions of `candidate`.

Invariant: `is_leader` is computed from the clock, so it turns false in time even while a renewal hangs. Check it before
each action; the action must take less than `remaining_s` plus the time between renew deadline and lease.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable
from typing import Protocol

from tandem.core.clock import Clock, SystemClock
from tandem.core.machine import random_bytes, random_id, wall_s
from tandem.kube.candidate import Candidate, LeaseTerms
from tandem.kube.errors import ConflictError, KubeError, NotFoundError
from tandem.kube.lease import Lease

_LOG = logging.getLogger(__name__)


class Leases(Protocol):
    """The part of `KubeApi` that the election needs."""

    async def read_lease(self, name: str) -> Lease: ...
    async def create_lease(self, lease: Lease) -> Lease: ...
    async def replace_lease(self, lease: Lease) -> Lease: ...


def own_identity(name: str) -> str:
    """An identity that is unique to this process: `name`, such as the pod's, and a random suffix."""
    return f"{name}_{random_id()[:8]}"


class LeaderElection:
    """Takes part in the election until `run` is cancelled.

    Args:
        wall_s: seconds since 1970, shown in the lease for people.
        jitter: spreads the rounds of several candidates.
    """

    def __init__(
        self,
        leases: Leases,
        lease_name: str,
        identity: str,
        terms: LeaseTerms | None = None,
        *,
        clock: Clock | None = None,
        wall_s: Callable[[], float] = wall_s,
        jitter: random.Random | None = None,
    ) -> None:
        self._leases = leases
        self._lease_name = lease_name
        self._candidate = Candidate(identity, terms or LeaseTerms())
        self._clock = clock or SystemClock()
        self._wall_s = wall_s
        self._jitter = jitter or random.Random(random_bytes(8))
        self._was_leader = False
        self._complaint = ""
        self.holder = ""

    @property
    def identity(self) -> str:
        return self._candidate.identity

    @property
    def is_leader(self) -> bool:
        return self.remaining_s > 0

    @property
    def remaining_s(self) -> float:
        """Seconds for which this process is certain to lead; 0 when it does not."""
        return self._candidate.remaining_s(self._clock.now_s())

    async def run(self) -> None:
        """Takes part until cancelled; then releases the lease, so that a successor need not wait."""
        terms = self._candidate.terms
        try:
            while True:
                await self.round()
                await asyncio.sleep(terms.retry_s * self._jitter.uniform(0.8, 1.0))
        finally:
            await self._resign()

    async def round(self) -> None:
        """Reads the lease once, and takes or renews it if possible. Logs errors of the API instead of raising them."""
        try:
            async with asyncio.timeout(self._candidate.terms.renew_deadline_s):
                await self._stand()
            self._complaint = ""
        except ConflictError:
            pass  # NOTE: another one was faster; the next round sees who
        except (KubeError, TimeoutError) as error:
            self._complain(error)
        self._tell()

    async def _stand(self) -> None:
        """Reads the lease once, and writes this candidate's bid for it, if any."""
        candidate = self._candidate
        try:
            lease = await self._leases.read_lease(self._lease_name)
        except NotFoundError:
            candidate.lost()
            asked_s = self._clock.now_s()
            made = await self._leases.create_lease(candidate.first_bid(self._lease_name, self._wall_s()))
        else:
            self.holder = lease.holder
            asked_s = self._clock.now_s()
            candidate.saw(lease, asked_s)
            bid = candidate.bid(asked_s, self._wall_s())
            if bid is None:
                return
            made = await self._leases.replace_lease(bid)
        self.holder = made.holder
        candidate.won(made, asked_s, self._clock.now_s())

    async def _resign(self) -> None:
        """Releases the lease. NOTE: it may be newer than the last known one: a renewal cannot be revoked once sent."""
        self._candidate.lost()
        self._tell()
        with contextlib.suppress(KubeError, TimeoutError):
            async with asyncio.timeout(self._candidate.terms.retry_s):
                while not await self._has_let_go():
                    pass

    async def _has_let_go(self) -> bool:
        self._candidate.saw(await self._leases.read_lease(self._lease_name), self._clock.now_s())
        resignation = self._candidate.resignation()
        if resignation is None:
            return True
        try:
            await self._leases.replace_lease(resignation)
        except ConflictError:
            return False
        return True

    def _complain(self, error: Exception) -> None:
        reason = str(error) or "the API took too long"
        if reason != self._complaint:
            self._complaint = reason
            _LOG.warning("the lease %s cannot be held or seen: %s", self._lease_name, reason)

    def _tell(self) -> None:
        """Logs that leading began or ended."""
        is_leader = self.is_leader
        if is_leader != self._was_leader:
            self._was_leader = is_leader
            verb = "leads" if is_leader else "leads no more"
            _LOG.info(
                "%s %s (lease %s, held by %s)", self.identity, verb, self._lease_name, self.holder or "no process"
            )
