"""Through a real router, and real streams to workers that only report."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Mapping

import pytest

from tandem.core.clock import SystemClock
from tandem.core.errors import LocalityUnavailableError
from tandem.planner_service.listed_workers import ListedWorkers
from tandem.planner_service.targets import Pool
from tandem.planner_service.workers import PoolLoad, WorkerWatch
from tandem.process.ports import free_ports
from tandem.routing.speed import DecodeSpeed, PrefillSpeed, PrefillWork, Speed
from tandem.rpc.messages import ModelInfo, PrefillSample, StepSample
from tests.helpers.secret import AS_PLANNER
from tests.unit.planner_service.fleets import decode, prefill, stub_fleet
from tests.unit.process.stub_workers import eventually, model

P, D = Pool.PREFILL, Pool.DECODE
GUESS = Speed(PrefillSpeed(1.0, 0.1, 1e-6), DecodeSpeed(7.0, 0.1, 1e-5))


@contextlib.asynccontextmanager
async def watching(
    router: str, model: str | None = None, priors: Mapping[Pool, Speed] | None = None
) -> AsyncIterator[WorkerWatch]:
    watch = WorkerWatch(ListedWorkers([router], AS_PLANNER, model), SystemClock(), AS_PLANNER, priors=priors)
    task = asyncio.create_task(watch.run())
    try:
        yield watch
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def sizes(watch: WorkerWatch) -> tuple[int, int]:
    loads = watch.loads()
    return loads[P].num_ready, loads[D].num_ready


def test_pools_are_what_their_ready_workers_say_together() -> None:
    async def story() -> None:
        workers = [
            prefill("p-0", queued=PrefillWork(1, 100, 5000)),
            prefill("p-1", queued=PrefillWork(2, 300, 9000)),
            decode("d-0", num_running=5, num_context_tokens=900, num_total_blocks=1000),
            decode("d-1", num_running=2, num_context_tokens=100, num_total_blocks=500),
            decode("d-2", lifecycle="starting"),
            decode("d-3", lifecycle="draining"),
        ]
        async with stub_fleet(*workers) as fleet, watching(fleet.router, priors={P: GUESS}) as watch:
            fleet.tell(2, num_waiting=3)
            await eventually(lambda: sizes(watch) == (2, 2) and watch.loads()[D].num_waiting == 3)
            loads = watch.loads()
            assert loads[P].queued_ms == pytest.approx(3 * 1.0 + 400 * 0.1 + 14_000 * 1e-6)
            assert loads[P].speed == GUESS
            seen = loads[D]
            assert (seen.num_running, seen.num_context_tokens, seen.kv_tokens) == (4, 1000, 500 * 16)
            assert seen.speed is None
            assert watch.problem is None

    asyncio.run(story())


def test_a_worker_that_dies_or_drains_is_ready_no_more() -> None:
    async def story() -> None:
        async with stub_fleet(prefill(), decode("d-0"), decode("d-1")) as fleet, watching(fleet.router) as watch:
            await eventually(lambda: sizes(watch) == (1, 2))
            fleet.tell(1, lifecycle="draining")
            await eventually(lambda: sizes(watch) == (1, 1))
            await fleet.servers[2].stop(0)
            await eventually(lambda: sizes(watch) == (1, 0))

    asyncio.run(story())


def test_speeds_are_learned_from_what_workers_measure() -> None:
    truth = DecodeSpeed(12.0, 0.4, 1e-3)

    async def story() -> None:
        chance = random.Random(3)
        async with stub_fleet(prefill(), decode()) as fleet, watching(fleet.router, priors={D: GUESS}) as watch:
            await eventually(lambda: sizes(watch) == (1, 1))
            assert watch.loads()[D].speed == GUESS
            samples = []
            for _ in range(200):
                num_running, num_tokens = chance.randint(1, 60), chance.randint(100, 50_000)
                duration_s = truth.step_ms(num_running, num_tokens) / 1000
                samples.append(
                    StepSample(num_running=num_running, num_context_tokens=num_tokens, duration_s=duration_s)
                )
            fleet.tell(1, step_samples=tuple(samples))
            await eventually(lambda: watch.loads()[D].speed != GUESS)
            learned = watch.loads()[D].speed
            assert learned is not None
            assert learned.decode.step_ms(30, 20_000) == pytest.approx(truth.step_ms(30, 20_000), rel=0.05)
            assert learned.prefill == GUESS.prefill
            assert watch.loads()[P].speed is None  # NOTE: of one kind with decode, but nobody measured a prompt

    asyncio.run(story())


def test_a_prompt_measured_by_either_pool_tells_of_the_kind() -> None:
    async def story() -> None:
        async with stub_fleet(prefill(), decode()) as fleet, watching(fleet.router) as watch:
            await eventually(lambda: sizes(watch) == (1, 1))
            sample = PrefillSample(work=PrefillWork.of(1000, 0), duration_s=0.5)
            fleet.tell(0, prefill_samples=(sample,) * 64)
            await eventually(lambda: watch.loads()[P].speed is not None)
            speed = watch.loads()[P].speed
            assert speed is not None
            assert speed.prefill.prompt_ms(1000, 0) == pytest.approx(500, rel=0.05)

    asyncio.run(story())


def test_only_workers_of_the_model_count() -> None:
    other: ModelInfo = model("other")

    async def story() -> None:
        async with stub_fleet(prefill(), decode("d-0"), decode("d-1", served=other)) as fleet:
            everyone = ListedWorkers([fleet.router], AS_PLANNER)
            chosen = ListedWorkers([fleet.router], AS_PLANNER, "other")
            async with asyncio.timeout(10.0):
                while len(await everyone.workers()) < 3:
                    await asyncio.sleep(0.01)
            assert [record.worker.worker_id for record in await chosen.workers()] == ["d-1"]
            await asyncio.gather(everyone.close(), chosen.close())

    asyncio.run(story())


def test_without_a_router_nobody_new_is_seen_and_that_is_said() -> None:
    async def story() -> None:
        (port,) = free_ports(1, "127.0.0.1", random.Random())
        async with watching(f"127.0.0.1:{port}") as watch:
            await eventually(lambda: watch.problem is not None)
            assert "no router answers" in str(watch.problem)
            assert watch.loads() == {P: PoolLoad(), D: PoolLoad()}

    asyncio.run(story())


def test_one_router_that_answers_is_enough_and_the_others_list_is_joined() -> None:
    async def story() -> None:
        (port,) = free_ports(1, "127.0.0.1", random.Random())
        async with stub_fleet(prefill()) as one, stub_fleet(decode()) as two:
            listed = ListedWorkers([one.router, f"127.0.0.1:{port}", two.router], AS_PLANNER)
            found: set[str] = set()

            async def both() -> None:
                while len(found) < 2:
                    found.update(record.worker.worker_id for record in await listed.workers())

            await asyncio.wait_for(both(), 10.0)
            await listed.close()
            assert found == {"p-0", "d-0"}
            assert listed.problem is None
        with pytest.raises(LocalityUnavailableError):
            await ListedWorkers([f"127.0.0.1:{port}"], AS_PLANNER).workers()

    asyncio.run(story())
