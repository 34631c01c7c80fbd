"""Assembles the planner's observation of the cluster from gateway counters, worker reports and the number of replicas.

Invariant: missing data is reported in `ClusterObservation.problems`, never guessed. Without traffic counts, or without
ready workers in a pool, there is no observation to plan from. Failures outside do not raise.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from tandem.core.clock import Clock
from tandem.core.errors import TandemError
from tandem.planner_service.distribution import Distribution
from tandem.planner_service.scrape import GatewayScraper
from tandem.planner_service.startups import Startups
from tandem.planner_service.targets import Pool, PoolReplicas, ScaleTargets
from tandem.planner_service.traffic import TrafficMeter, TrafficWindow
from tandem.planner_service.workers import PoolLoad, WorkerWatch
from tandem.planning.observation import Observation, PoolState

_READ_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLatency:
    """Latency in one window, in milliseconds: the mean, and the quantile at the share that must meet the objective."""

    mean_ms: float | None = None
    share_ms: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterObservation:
    """Everything observed in one round.

    Args:
        at_s: seconds since 1970.
        observation: input of the policy; None if too little was observed to plan.
        replicas: replicas of each pool that could be read.
        problems: messages on what could not be observed; while there are any, no pool may shrink.
        ttft, tpot: latencies measured by the gateways.
    """

    at_s: float
    observation: Observation | None
    replicas: Mapping[Pool, PoolReplicas]
    problems: tuple[str, ...] = ()
    ttft: MeasuredLatency = MeasuredLatency()
    tpot: MeasuredLatency = MeasuredLatency()


class Observer:
    """Collects one observation per call of `observe`.

    Args:
        wall_s: wall clock, in seconds since 1970.
        max_running: maximum number of requests that one worker runs at once.
        share: share of the requests that must meet the objectives.
        read_timeout_s: timeout of reading one pool's replicas.
    """

    def __init__(
        self,
        scraper: GatewayScraper,
        workers: WorkerWatch,
        targets: ScaleTargets,
        clock: Clock,
        wall_s: Callable[[], float],
        *,
        max_running: int,
        share: float,
        read_timeout_s: float = _READ_TIMEOUT_S,
    ) -> None:
        self._scraper = scraper
        self._workers = workers
        self._targets = targets
        self._clock = clock
        self._wall_s = wall_s
        self._max_running = max_running
        self._share = share
        self._read_timeout_s = read_timeout_s
        self._meter = TrafficMeter()
        self._startups = {pool: Startups() for pool in Pool}

    async def observe(self) -> ClusterObservation:
        """Returns the current state; its traffic is the traffic since the last call."""
        problems: list[str] = []
        replicas = await self._read_replicas(problems)
        scrape = await self._scraper.scrape()
        now_s, wall_s = self._clock.now_s(), self._wall_s()
        window = self._meter.update(now_s, wall_s, scrape.counts)
        loads = self._workers.loads()
        pools = {pool: self._pool(pool, loads[pool], replicas.get(pool), wall_s) for pool in Pool}
        problems += [*scrape.problems, *filter(None, [self._workers.problem])]
        problems += filter(None, (_unseen(pool, loads[pool], replicas.get(pool)) for pool in Pool))
        observed = ClusterObservation(at_s=wall_s, observation=None, replicas=replicas, problems=tuple(problems))
        return observed if window is None else self._with_window(observed, now_s, window, pools)

    def _with_window(
        self, observed: ClusterObservation, now_s: float, window: TrafficWindow, pools: Mapping[Pool, PoolState]
    ) -> ClusterObservation:
        ttft, tpot = self._latency(window.ttft), self._latency(window.tpot)
        observed = replace(observed, ttft=ttft, tpot=tpot)
        if not all(state.num_ready for state in pools.values()):
            return observed
        observation = Observation(
            now_s=now_s,
            traffic=window.traffic,
            prefill=pools[Pool.PREFILL],
            decode=pools[Pool.DECODE],
            ttft_ms=ttft.mean_ms,
            tpot_ms=tpot.mean_ms,
        )
        return replace(observed, observation=observation)

    async def _read_replicas(self, problems: list[str]) -> Mapping[Pool, PoolReplicas]:
        found = await asyncio.gather(*(self._read(pool, problems) for pool in Pool))
        known = {pool: replicas for pool, replicas in zip(Pool, found, strict=True) if replicas is not None}
        for pool, replicas in known.items():
            self._startups[pool].observe(replicas.replicas or ())
        return known

    async def _read(self, pool: Pool, problems: list[str]) -> PoolReplicas | None:
        try:
            async with asyncio.timeout(self._read_timeout_s):
                return await self._targets.read(pool)
        except TimeoutError:
            problems.append(f"the {pool} pool's replicas could not be read in {self._read_timeout_s:g} s")
        except TandemError as error:
            problems.append(str(error))
        return None

    def _pool(self, pool: Pool, load: PoolLoad, replicas: PoolReplicas | None, wall_s: float) -> PoolState:
        return PoolState(
            num_wanted=load.num_ready if replicas is None else replicas.num_wanted,
            num_ready=load.num_ready,
            starting_s=() if replicas is None else _starting_s(replicas, load.num_ready, wall_s),
            speed=load.speed,
            kv_tokens=load.kv_tokens,
            max_running=self._max_running,
            num_waiting=load.num_waiting,
            num_running=load.num_running,
            num_context_tokens=load.num_context_tokens,
            queued_ms=load.queued_ms,
            startup_s=self._startups[pool].typical_s,
        )

    def _latency(self, seconds: Distribution) -> MeasuredLatency:
        mean_s, share_s = seconds.mean, seconds.quantile(self._share)
        return MeasuredLatency(
            mean_ms=None if mean_s is None else 1000 * mean_s, share_ms=None if share_s is None else 1000 * share_s
        )


def _starting_s(replicas: PoolReplicas, num_ready: int, wall_s: float) -> Sequence[float]:
    """Seconds since each starting replica was created: the youngest are taken to be those that are not ready, and
    replicas requested but not created yet count with 0.
    """
    existing = replicas.replicas or ()
    youngest = sorted(max(0.0, wall_s - replica.created_s) for replica in existing)
    num_starting = max(0, len(existing) - num_ready)
    num_missing = max(0, replicas.num_wanted - max(num_ready, len(existing)))
    return (*youngest[:num_starting], *(0.0,) * num_missing)


def _unseen(pool: Pool, load: PoolLoad, replicas: PoolReplicas | None) -> str | None:
    """Returns the reason why the observed workers may be incomplete, or None."""
    if not load.num_ready:
        return f"no {pool} worker is seen to be ready"
    existing = () if replicas is None or replicas.replicas is None else replicas.replicas
    num_ready = sum(replica.ready_s is not None for replica in existing)
    if num_ready > load.num_ready:
        return f"{num_ready} pods of the {pool} workers are ready, of which {load.num_ready} are seen"
    return None
