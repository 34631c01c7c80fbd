"""One leader among several processes, under a Lease in the Kubernetes API. Acts on what `candidate` decides.

Invariant: `is_leader` is asked of the clock, so it turns false in time even while a renewal hangs. Whoever acts as the
leader asks it right before, and lets the act take less than `remaining_s` plus what lies between deadline and lease.
"""

import asyncio
import contextlib
import logging
import random
import time
import uuid
from collections.abc import Callable
from typing import Protocol

from tandem.core.clock import Clock, SystemClock
from tandem.kube.candidate import Candidate, LeaseTerms
from tandem.kube.errors import ConflictError, KubeError, NotFoundError
from tandem.kube.lease import Lease

_LOG = logging.getLogger(__name__)


class Leases(Protocol):
    """The part of `KubeApi` that is needed."""

    async def read_lease(self, name: str) -> Lease: ...
    async def create_lease(self, lease: Lease) -> Lease: ...
    async def replace_lease(self, lease: Lease) -> Lease: ...


def own_identity(name: str) -> str:
    """`name`, a pod's for example, made unlike that of any other process."""
    return f"{name}_{uuid.uuid4().hex[:8]}"


class LeaderElection:
    """Takes part until `run` is cancelled.

    Args:
        wall_s: seconds since 1970, which the lease shows to people.
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
        wall_s: Callable[[], float] = time.time,
        jitter: random.Random | None = None,
    ) -> None:
        self._leases = leases
        self._lease_name = lease_name
        self._candidate = Candidate(identity, terms or LeaseTerms())
        self._clock = clock or SystemClock()
        self._wall_s = wall_s
        self._jitter = jitter or random.Random()
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
        """For how long this process surely leads, seconds; 0 when it does not."""
        return self._candidate.remaining_s(self._clock.now_s())

    async def run(self) -> None:
        """Stand for election until cancelled; then let go of the lease, so that the next one need not wait."""
        terms = self._candidate.terms
        try:
            while True:
                await self.round()
                await asyncio.sleep(terms.retry_s * self._jitter.uniform(0.8, 1.0))
        finally:
            await self._resign()

    async def round(self) -> None:
        """Look once, and take or renew what may be taken. Never raises what the API does to it."""
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
        """NOTE: what was written last may be later than what we know: a renewal cannot be called back."""
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
        """Say once that leading began or ended."""
        is_leader = self.is_leader
        if is_leader != self._was_leader:
            self._was_leader = is_leader
            verb = "leads" if is_leader else "leads no more"
            _LOG.info("%s %s (lease %s, held by %s)", self.identity, verb, self._lease_name, self.holder or "nobody")
