import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

from tandem.core.clock import ManualClock
from tandem.planner_service.warm import WarmClient, WarmSamples
from tandem.routing.speed import PrefillWork
from tandem.rpc.messages import PrefillSample, StepSample, WorkerStatus
from tests.unit.process.stub_workers import status

PROMPT = PrefillSample(work=PrefillWork.of(100, 0), duration_s=1.0)
STEP = StepSample(num_running=1, num_context_tokens=100, duration_s=0.1)


def report(worker_id: str = "a", incarnation: str = "1") -> WorkerStatus:
    return replace(status(worker_id, incarnation=incarnation), prefill_samples=(PROMPT,), step_samples=(STEP,))


def num_samples(found: WorkerStatus) -> int:
    return len(found.prefill_samples) + len(found.step_samples)


def test_samples_of_the_first_seconds_of_work_are_left_out() -> None:
    clock = ManualClock()
    samples = WarmSamples(clock, 10.0)
    idle = status("a")
    assert samples.filtered(idle) is idle
    clock.advance(100.0)
    assert num_samples(samples.filtered(report())) == 0
    clock.advance(9.0)
    assert num_samples(samples.filtered(report())) == 0
    clock.advance(1.0)
    assert num_samples(samples.filtered(report())) == 2
    assert num_samples(samples.filtered(report("b"))) == 0


def test_a_worker_that_starts_again_is_cold_again() -> None:
    clock = ManualClock()
    samples = WarmSamples(clock, 10.0)
    samples.filtered(report())
    clock.advance(10.0)
    assert num_samples(samples.filtered(report())) == 2
    assert num_samples(samples.filtered(report(incarnation="2"))) == 0


def test_a_client_tells_the_rest_of_the_news_and_is_closed() -> None:
    class Client:
        num_closed = 0

        async def watch(self, interval_s: float) -> AsyncIterator[WorkerStatus]:
            assert interval_s == 0.25
            try:
                yield report()
                yield report()
            finally:
                self.num_closed += 1

        async def close(self) -> None:
            self.num_closed += 10

    async def story() -> None:
        client = Client()
        warm = WarmClient(client, WarmSamples(ManualClock(), 1.0))  # type: ignore[arg-type]
        heard = [status async for status in warm.watch(0.25)]
        await warm.close()
        assert [(one.worker.worker_id, num_samples(one)) for one in heard] == [("a", 0), ("a", 0)]
        assert client.num_closed == 11

    asyncio.run(story())
