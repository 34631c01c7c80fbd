"""Real gateways' counters over HTTP, a real router with stub workers, and replicas in memory."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from tandem.core.clock import ManualClock, SystemClock
from tandem.core.errors import UnavailableError
from tandem.planner_service.listed_workers import ListedWorkers
from tandem.planner_service.observer import ClusterObservation, Observer
from tandem.planner_service.scrape import GatewayScraper
from tandem.planner_service.targets import NoTargets, Pool, PoolReplicas, Replica, ScaleTargets
from tandem.planner_service.workers import WorkerWatch
from tandem.planning.observation import Observation
from tests.helpers.secret import AS_PLANNER
from tests.unit.planner_service.fleets import StubFleet, decode, prefill, stub_fleet
from tests.unit.planner_service.gateways import FakeGateway, serving
from tests.unit.process.stub_workers import eventually

P, D = Pool.PREFILL, Pool.DECODE
WALL_S = 5000.0


@dataclass
class Replicas:
    """`ScaleTargets` that are only read. A number instead of replicas is what is wanted, and nothing more known."""

    pools: dict[Pool, PoolReplicas | UnavailableError] = field(default_factory=dict)

    async def read(self, pool: Pool) -> PoolReplicas:
        found = self.pools[pool]
        if isinstance(found, UnavailableError):
            raise found
        return found

    async def write(self, pool: Pool, num_replicas: int, seen: PoolReplicas) -> None:
        raise AssertionError


class Watcher:
    """An observer and all it looks at. Its clocks stand still unless told."""

    def __init__(self, fleet: StubFleet, gateway: FakeGateway, observer: Observer, clock: ManualClock) -> None:
        self.fleet = fleet
        self.gateway = gateway
        self.observer = observer
        self.clock = clock

    async def observe_cluster(self) -> ClusterObservation:
        self.clock.advance(10.0)
        return await self.observer.observe()

    async def observe(self) -> Observation:
        seen = (await self.observe_cluster()).observation
        assert seen is not None
        return seen


@contextlib.asynccontextmanager
async def watcher(
    targets: ScaleTargets | None = None, num_decode: int = 2, read_timeout_s: float = 5.0
) -> AsyncIterator[Watcher]:
    gateway, clock = FakeGateway(), ManualClock()
    workers = [prefill(), *(decode(f"d-{number}") for number in range(num_decode))]
    async with stub_fleet(*workers) as fleet, serving(gateway) as server:
        watch = WorkerWatch(ListedWorkers([fleet.router], AS_PLANNER), SystemClock(), credentials=AS_PLANNER)
        task = asyncio.create_task(watch.run())
        observer = Observer(
            GatewayScraper([f"127.0.0.1:{server.port}"]),
            watch,
            targets or NoTargets(),
            clock,
            lambda: WALL_S + clock.now_s(),
            max_running=64,
            share=0.9,
            read_timeout_s=read_timeout_s,
        )
        try:
            await eventually(lambda: watch.loads()[D].num_ready == num_decode and watch.loads()[P].num_ready == 1)
            yield Watcher(fleet, gateway, observer, clock)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def test_the_first_look_only_begins_to_count() -> None:
    async def story() -> None:
        async with watcher() as seen:
            observed = await seen.observe_cluster()
            assert (observed.observation, observed.problems, observed.at_s) == (None, (), WALL_S + 10)
            seen.gateway.serve(ttft_s=0.2, tpot_s=0.02)
            seen.gateway.serve(ttft_s=0.2, tpot_s=0.02)
            observed = await seen.observe_cluster()
            found = observed.observation
            assert found is not None
            assert (found.now_s, found.traffic.num_requests, found.traffic.duration_s) == (20.0, 2, 10.0)
            assert found.ttft_ms == pytest.approx(200)
            assert found.tpot_ms == pytest.approx(20)
            assert observed.ttft.mean_ms == pytest.approx(200)
            assert observed.ttft.share_ms == pytest.approx(235)  # NOTE: nine tenths of the bucket from 100 to 250 ms
            assert (found.prefill.num_wanted, found.decode.num_wanted, found.decode.num_ready) == (1, 2, 2)
            assert (found.decode.starting_s, found.decode.startup_s, found.decode.max_running) == ((), None, 64)

    asyncio.run(story())


def test_replicas_that_start_and_how_long_they_take() -> None:
    async def story() -> None:
        wall_s = WALL_S + 10
        young = [Replica(name=f"d-{n}", created_s=wall_s - 100, ready_s=wall_s - 60) for n in range(2)]
        targets = Replicas({P: PoolReplicas(num_wanted=1), D: PoolReplicas(num_wanted=2, replicas=young)})
        async with watcher(targets) as seen:
            await seen.observe_cluster()
            starting = [Replica(name="d-2", created_s=wall_s + 4), Replica(name="d-3", created_s=wall_s + 9)]
            targets.pools[D] = PoolReplicas(num_wanted=5, replicas=[*young, *starting])
            found = await seen.observe()
            assert found.decode.num_wanted == 5
            assert sorted(found.decode.starting_s) == [0.0, 1.0, 6.0]
            assert (found.prefill.starting_s, found.decode.startup_s) == ((), None)
            done = [Replica(name=one.name, created_s=one.created_s, ready_s=wall_s + 19) for one in starting]
            targets.pools[D] = PoolReplicas(num_wanted=4, replicas=[*young, *done])
            observed = await seen.observe_cluster()
            assert observed.observation is not None
            assert observed.observation.decode.startup_s == 12.5
            assert observed.problems == ("4 pods of the decode workers are ready, of which 2 are seen",)
            assert sorted(observed.observation.decode.starting_s) == [11.0, 16.0]

    asyncio.run(story())


def test_a_pool_without_a_ready_worker_is_not_planned_for() -> None:
    async def story() -> None:
        async with watcher(num_decode=1) as seen:
            await seen.observe_cluster()
            seen.fleet.tell(1, lifecycle="draining")
            await eventually(lambda: seen.fleet.stubs[1].num_watchers == 2)
            async with asyncio.timeout(10.0):
                while (observed := await seen.observe_cluster()).observation is not None:
                    await asyncio.sleep(0.01)
            assert observed.problems == ("no decode worker is seen to be ready",)

    asyncio.run(story())


def test_what_cannot_be_read_is_said_and_the_rest_goes_on() -> None:
    async def story() -> None:
        targets = Replicas({P: PoolReplicas(num_wanted=3), D: UnavailableError("the API is away")})
        async with watcher(targets) as seen:
            await seen.observe_cluster()
            observed = await seen.observe_cluster()
            assert observed.problems == ("the API is away",)
            assert set(observed.replicas) == {P}
            assert observed.observation is not None
            assert (observed.observation.prefill.num_wanted, observed.observation.decode.num_wanted) == (3, 2)

    asyncio.run(story())


def test_an_api_that_hangs_does_not_hold_up_the_rest() -> None:
    class Hanging(Replicas):
        async def read(self, pool: Pool) -> PoolReplicas:
            if pool is P:
                await asyncio.Event().wait()
            return await super().read(pool)

    async def story() -> None:
        async with watcher(Hanging({D: PoolReplicas(num_wanted=2)}), read_timeout_s=0.05) as seen:
            await seen.observe_cluster()
            observed = await seen.observe_cluster()
            assert observed.problems == ("the prefill pool's replicas could not be read in 0.05 s",)
            assert (set(observed.replicas), observed.observation is None) == ({D}, False)

    asyncio.run(story())
