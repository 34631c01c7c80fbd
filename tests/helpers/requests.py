"""Builders of schedulers and requests for tests that run without a model."""

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.core.config import SchedulerConfig
from tandem.core.sampling_params import SamplingParams
from tandem.kvcache.manager import KVCacheManager
from tandem.kvcache.spec import KVLayout
from tandem.scheduler.output import ExecutorOutput, SchedulerOutput
from tandem.scheduler.request import Request, RequestState
from tandem.scheduler.scheduler import Scheduler
from tests.helpers.fake_executor import FakeExecutor
from tests.helpers.layouts import layout_of


def request_of(
    request_id: str,
    prompt: Sequence[int],
    max_tokens: int = 4,
    *,
    seed: int = 0,
    priority: int = 0,
    root: bytes = b"root",
    eos: frozenset[int] = frozenset(),
    params: SamplingParams | None = None,
) -> Request:
    return Request(
        request_id, prompt, params or SamplingParams(), seed, root, eos, max_tokens=max_tokens, priority=priority
    )


@dataclass
class Bench:
    """A scheduler, its block accounting and a fake executor that proves what it reads."""

    scheduler: Scheduler
    kv: KVCacheManager
    executor: FakeExecutor
    steps: list[SchedulerOutput] = field(default_factory=list)

    def step(self) -> list[Request]:
        """One step; proves the budget, that no running decode was left out, and all accounts."""
        output = self.scheduler.schedule()
        assert output.num_tokens <= self.scheduler.config.max_num_batched_tokens, "over budget"
        scheduled = {item.request_id for item in output.scheduled}
        assert len(scheduled) == len(output.scheduled), "scheduled twice"
        for item in output.scheduled:
            request = self.scheduler._requests[item.request_id]
            assert request.state is RequestState.RUNNING, "a request without blocks was scheduled"
        assert output.scheduled or not self.scheduler.has_work, "nothing was scheduled though there is work"
        for request in self.scheduler._running:
            assert request.request_id in scheduled or not request.is_decoding, "a running decode was stalled"
        for request in self.scheduler._requests.values():
            if request.state is RequestState.WAITING:
                assert request.num_computed_tokens == 0, "a request without blocks claims computed tokens"
        self.steps.append(output)
        ended = self.scheduler.update(output, self.execute(output))
        self.scheduler.check()
        return ended

    def execute(self, step: SchedulerOutput) -> ExecutorOutput:
        """Computed as by another process, which has nothing of a step but its bytes."""
        handle = self.executor.submit(pickle.loads(pickle.dumps(step)))
        result: ExecutorOutput = pickle.loads(pickle.dumps(handle.result()))
        return result

    def run(self, max_steps: int = 10_000) -> list[Request]:
        """Until nothing is left to do; returns the requests in the order they ended."""
        ended: list[Request] = []
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                return ended
            ended += self.step()
        raise AssertionError(f"work is left after {max_steps} steps")


def bench_of(
    *,
    num_blocks: int = 32,
    layout: KVLayout | None = None,
    budget: int = 16,
    num_running: int = 8,
    num_waiting: int = 10_000,
    aging_steps: int = 50,
    max_model_len: int = 1000,
    prefix_caching: bool = True,
    watermark_pages: int = 0,
    checks_kv: bool = True,
    failing: frozenset[str] = frozenset(),
    acceptance: float | None = None,
) -> Bench:
    layout = layout or layout_of(None)
    kv = KVCacheManager(
        layout, num_blocks, max_chunk_tokens=budget, prefix_caching=prefix_caching, watermark_pages=watermark_pages
    )
    config = SchedulerConfig(budget, num_running, num_waiting, max_model_len, aging_steps)
    return Bench(Scheduler(config, kv), kv, FakeExecutor(layout if checks_kv else None, failing, acceptance))
