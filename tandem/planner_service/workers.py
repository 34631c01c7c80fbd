"""The planner's watch on every worker, which yields size, load and speed of each pool.

Made of the same parts as a router's: `FleetWatch` feeds a `FleetView`, which calibrates speeds. Decides nothing.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from tandem.core.clock import Clock
from tandem.planner_service.listed_workers import ListedWorkers
from tandem.planner_service.targets import Pool
from tandem.planner_service.warm import WarmClient, WarmSamples
from tandem.process.fleet_view import FleetView
from tandem.process.fleet_watch import FleetWatch, Watchable
from tandem.routing.admission import AdmissionLimits
from tandem.routing.calibration import Calibration
from tandem.routing.fleet import Fleet
from tandem.routing.snapshot import Links, LinkState, Role
from tandem.routing.speed import DecodeSpeed, PrefillSpeed, Speed
from tandem.rpc.client import client_of
from tandem.rpc.credentials import Credentials
from tandem.rpc.messages import WorkerAddress, WorkerStatus

_SILENCE_S = 2.0
_POLL_S = 1.0
_LINK = LinkState(bytes_per_s=1e9)
_ROLES = {Role.PREFILL: Pool.PREFILL, Role.DECODE: Pool.DECODE, Role.BOTH: Pool.DECODE}

# NOTE: only its proportions count, and only for what the samples of a kind leave open
_FIRST_SPEED = Speed(PrefillSpeed(2.0, 0.05, 1e-6), DecodeSpeed(5.0, 0.05, 5e-5))


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLoad:
    """Load of one pool: sums over its ready workers, except for speed and KV capacity.

    Args:
        speed: speed of the most frequent kind of worker; None if neither measured nor configured.
        kv_tokens: KV capacity of the smallest worker.
        queued_ms: prompt work that waits; 0 without a speed.
    """

    num_ready: int = 0
    speed: Speed | None = None
    kv_tokens: int = 0
    num_waiting: int = 0
    num_running: int = 0
    num_context_tokens: int = 0
    queued_ms: float = 0.0


class WorkerWatch:
    """Watches workers while `run` runs; `loads` returns the current state.

    Args:
        priors: a pool's speed until its workers have measured theirs.
    """

    def __init__(
        self,
        listed: ListedWorkers,
        clock: Clock,
        credentials: Credentials,
        *,
        warmup_s: float = 0.0,
        priors: Mapping[Pool, Speed] | None = None,
    ) -> None:
        self._listed = listed
        self._priors = dict(priors or {})
        self._calibration = Calibration(_FIRST_SPEED)
        fleet = Fleet(AdmissionLimits(), Links(_LINK), self._calibration.speed)
        self._view = FleetView(fleet, self._calibration, clock, dead_s=_SILENCE_S)
        samples = WarmSamples(clock, warmup_s)
        connect = partial(_connect, credentials, samples)
        self._watch = FleetWatch([listed], connect, self._view, _keep, silence_s=_SILENCE_S, poll_s=_POLL_S)

    @property
    def problem(self) -> str | None:
        """The reason why workers may be missing, or None."""
        return self._listed.problem

    async def run(self) -> None:
        """Watch until cancelled."""
        try:
            await self._watch.run()
        finally:
            await self._listed.close()

    def loads(self) -> Mapping[Pool, PoolLoad]:
        """Returns the load of both pools, without workers that are starting, draining or dead."""
        statuses: dict[Pool, list[WorkerStatus]] = {pool: [] for pool in Pool}
        for listing in self._view.listings():
            if listing.is_alive:
                statuses[_ROLES[listing.status.state.role]].append(listing.status)
        return {pool: self._load(pool, found) for pool, found in statuses.items()}

    def _load(self, pool: Pool, statuses: Sequence[WorkerStatus]) -> PoolLoad:
        if not statuses:
            return PoolLoad(speed=self._priors.get(pool))
        states = [status.state for status in statuses]
        kinds = Counter(state.kind for state in states)
        speed = self._speed(pool, max(kinds, key=lambda kind: (kinds[kind], kind)))
        num_waiting = sum(status.num_waiting for status in statuses)
        speeds = {kind: self._speed(pool, kind) or speed for kind in kinds}
        queued = ((speeds[state.kind], state.queued) for state in states)
        return PoolLoad(
            num_ready=len(states),
            speed=speed,
            kv_tokens=min(state.num_total_blocks * state.block_size for state in states),
            num_waiting=num_waiting,
            num_running=max(0, sum(state.num_running for state in states) - num_waiting),
            num_context_tokens=sum(state.num_context_tokens for state in states),
            queued_ms=sum(0.0 if known is None else known.prefill.ms(work) for known, work in queued),
        )

    def _speed(self, pool: Pool, kind: str) -> Speed | None:
        """The measured speed, with the configured estimate for the stage (prefill or decode) that was not measured."""
        prior = self._priors.get(pool)
        errors = self._calibration.errors().get(kind)
        if errors is None:
            return prior
        fitted, (prefill, decode) = self._calibration.speed(kind), errors
        num_told = prefill.num_samples if pool is Pool.PREFILL else decode.num_samples
        if not num_told:
            return prior
        guess = prior or fitted
        return Speed(
            fitted.prefill if prefill.num_samples else guess.prefill,
            fitted.decode if decode.num_samples else guess.decode,
        )


def _connect(credentials: Credentials, samples: WarmSamples, worker: WorkerAddress) -> Watchable:
    return WarmClient(client_of(worker, credentials), samples)


async def _keep(worker_id: str) -> None:
    """Does nothing, since no block index is kept here. NOTE: yields, as an index look-up would."""
    await asyncio.sleep(0)
