"""Routing measured twice: what each policy does to a recorded hour, and how long one decision takes.

The replay is a discrete-event model of prefill workers: one prompt at a time, first come first served, an LRU cache of
prefix blocks each; the time model is the router's own, so only knowledge and formula differ between rows. Decode is
left out. Arrivals are spread inside the trace's ticks.
"""

import argparse
import random
import statistics
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

from bench.load import ForeignLoad, prioritise
from bench.report import Report, Row
from bench.router_peers import CacheAware, DynamoLinear, DynamoProduct, WeightedScores
from tandem.routing.admission import AdmissionLimits
from tandem.routing.fleet import Fleet
from tandem.routing.pairing import Pairer, Pairing
from tandem.routing.policies import LeastLoaded, PredictedCost, PrefixOnly, Random, RoundRobin, RoutingPolicy
from tandem.routing.settlement import Settlement
from tandem.routing.snapshot import Links, LinkState, RequestShape, Role, WorkerState
from tandem.routing.speed import NO_WORK, DecodeSpeed, PrefillSpeed, PrefillWork, Speed
from tandem.workload.arrivals import spread_in_ticks
from tandem.workload.slo import percentiles
from tandem.workload.trace import MOONCAKE_BLOCK_SIZE, TraceRequest, read_mooncake

PUBLISHED_MEAN_TTFT_S = {
    "random": 23.4,
    "round robin": 15.5,
    "least loaded": 4.36,
    "sglang": 4.03,
    "llm-d 3/2/2": 3.63,
    "dynamo linear": 3.48,
    "lmetric": 3.30,
    "predicted cost, no fetch": 3.14,
    "predicted cost": 2.81,
}
POLICIES: dict[str, Callable[[], RoutingPolicy]] = {
    "random": Random,
    "round robin": RoundRobin,
    "prefix only": PrefixOnly,
    "least loaded": LeastLoaded,
    "sglang": CacheAware,
    "llm-d 3/2/2": WeightedScores,
    "dynamo linear": DynamoLinear,
    "lmetric": DynamoProduct,
    "predicted cost, no fetch": lambda: PredictedCost(num_fetch_sources=0),
    "predicted cost": PredictedCost,
}
FOREVER_S = 1e9
NUM_LAYERS, HIDDEN_SIZE, KV_BYTES_PER_TOKEN, NUM_WEIGHTS = 80, 8192, 327_680, 70e9


@dataclass(frozen=True, slots=True)
class Setting:
    """Assumptions about the cluster: a 70B dense model in 16 bits, KV of 8 heads of 128 in each of 80 layers."""

    num_workers: int
    effective_flops: float
    num_cache_blocks: int
    link: LinkState

    @property
    def speed(self) -> Speed:
        prefill = PrefillSpeed(
            ms_per_request=20.0,
            ms_per_token=1000 * 2 * NUM_WEIGHTS / self.effective_flops,
            ms_per_pair=1000 * 4 * HIDDEN_SIZE * NUM_LAYERS / self.effective_flops,
        )
        return Speed(prefill, DecodeSpeed(20.0, 0.1, 1e-5))


@dataclass(frozen=True, slots=True)
class Knowledge:
    """Knowledge of the router. interval_s: between reports (0: before every decision). Cached blocks likewise.

    index_delay_s: from a block's completion to its appearance in the index; None: known when it is queued.
    """

    name: str
    interval_s: float
    index_delay_s: float | None
    counts_in_flight: bool = True


EXACT = Knowledge("exact", 0.0, None)
STALE = Knowledge("1 s old", 1.0, 0.5)
STALE_UNCOUNTED = Knowledge("1 s old, in flight not counted", 1.0, 0.5, counts_in_flight=False)


@dataclass(slots=True)
class Job:
    """One prompt at a worker."""

    finished_s: float
    service_s: float
    work: PrefillWork
    num_tokens: int


@dataclass(slots=True)
class PrefillWorker:
    """A queue and a cache. `ready_s`: per cached block, when it has been computed; least recently used first."""

    worker_id: str
    setting: Setting
    free_at_s: float = 0.0
    jobs: deque[Job] = field(default_factory=deque)
    ready_s: OrderedDict[int, float] = field(default_factory=OrderedDict)

    def leading_blocks(self, block_ids: Sequence[int], computed_by_s: float) -> int:
        ready_s = self.ready_s
        for number, block_id in enumerate(block_ids):
            if ready_s.get(block_id, FOREVER_S) > computed_by_s:
                return number
        return len(block_ids)

    def serve(self, request: TraceRequest, num_cached_blocks: int, start_s: float) -> Job:
        """Queue a prompt of which so many blocks need no computing."""
        speed = self.setting.speed.prefill
        work = PrefillWork.of(request.num_prompt_tokens, num_cached_blocks * MOONCAKE_BLOCK_SIZE)
        service_s = speed.ms(work) / 1000
        self.free_at_s = max(self.free_at_s, start_s) + service_s
        job = Job(self.free_at_s, service_s, work, request.num_prompt_tokens)
        self.jobs.append(job)
        self._cache(request.block_ids, self.free_at_s)
        return job

    def _cache(self, block_ids: Sequence[int], ready_s: float) -> None:
        for block_id in reversed(block_ids):
            self.ready_s.setdefault(block_id, ready_s)
            self.ready_s.move_to_end(block_id)
        while len(self.ready_s) > self.setting.num_cache_blocks:
            self.ready_s.popitem(last=False)

    def state(self, now_s: float) -> WorkerState:
        while self.jobs and self.jobs[0].finished_s <= now_s:
            self.jobs.popleft()
        queued = NO_WORK
        for job in self.jobs:
            left = min(1.0, (job.finished_s - now_s) / job.service_s)
            work = job.work
            queued += PrefillWork(left * work.num_requests, left * work.num_tokens, left * work.num_pairs)
        num_tokens = sum(job.num_tokens for job in self.jobs)
        num_blocks = self.setting.num_cache_blocks
        return worker_state(
            self.worker_id,
            Role.PREFILL,
            num_total_blocks=num_blocks,
            num_free_blocks=max(0, num_blocks - num_tokens // MOONCAKE_BLOCK_SIZE),
            queued=queued,
            num_running=len(self.jobs),
            num_context_tokens=num_tokens,
        )


def worker_state(
    worker_id: str, role: Role, *, num_total_blocks: int, num_free_blocks: int, **load: object
) -> WorkerState:
    """A report of the simulated model."""
    state = WorkerState(
        worker_id=worker_id,
        role=role,
        kind="70b",
        fingerprint="70b",
        block_size=MOONCAKE_BLOCK_SIZE,
        block_bytes=MOONCAKE_BLOCK_SIZE * KV_BYTES_PER_TOKEN,
        chunk_tokens=8192,
        num_total_blocks=num_total_blocks,
        num_free_blocks=num_free_blocks,
    )
    return replace(state, **load)  # type: ignore[arg-type]


DECODE = worker_state("decode", Role.DECODE, num_total_blocks=1 << 40, num_free_blocks=1 << 40)


class Replay:
    """One policy, one trace."""

    def __init__(self, setting: Setting, knowledge: Knowledge, policy: RoutingPolicy, seed: int) -> None:
        limits = AdmissionLimits(
            fresh_s=FOREVER_S, dead_s=FOREVER_S, forget_s=FOREVER_S, settle_s=0.0, max_ttft_ms=1e12, max_local_tokens=0
        )
        speed = setting.speed
        fleet = Fleet(limits, Links(setting.link), lambda kind: speed, seed)
        self._pairer = Pairer(fleet, policy)
        self._setting = setting
        self._knowledge = knowledge
        self._workers = {f"p{i}": PrefillWorker(f"p{i}", setting) for i in range(setting.num_workers)}
        self._reported_s = -FOREVER_S
        self.ttft_s: list[float] = []
        self.errors_s: list[float] = []
        self.num_hits = 0
        self.num_blocks = 0

    def run(self, requests: Iterable[TraceRequest]) -> None:
        for number, request in enumerate(requests):
            now_s = request.arrival_s
            if now_s - self._reported_s >= self._knowledge.interval_s:
                self._reported_s = now_s
                for state in (DECODE, *(worker.state(now_s) for worker in self._workers.values())):
                    self._pairer.fleet.report(replace(state, reported_at_s=now_s))
            answer = self._pairer.pair(self._shape(str(number), request, now_s), now_s)
            assert isinstance(answer, Pairing), answer
            assert answer.prefill_id is not None
            self._serve(request, answer, self._workers[answer.prefill_id])
            if not self._knowledge.counts_in_flight:
                self._pairer.settle(Settlement(request_id=str(number)))

    def _shape(self, request_id: str, request: TraceRequest, now_s: float) -> RequestShape:
        delay_s = self._knowledge.index_delay_s
        computed_by_s = FOREVER_S / 2 if delay_s is None else now_s - delay_s
        held = {key: worker.leading_blocks(request.block_ids, computed_by_s) for key, worker in self._workers.items()}
        return RequestShape(
            request_id=request_id,
            num_tokens=request.num_prompt_tokens,
            num_expected_output=1,
            leading_blocks={key: num_blocks for key, num_blocks in held.items() if num_blocks},
        )

    def _serve(self, request: TraceRequest, answer: Pairing, worker: PrefillWorker) -> None:
        """The true course: the worker uses what it will hold by then, and a fetch waits until its source has it."""
        now_s = start_s = request.arrival_s
        num_cached = worker.leading_blocks(request.block_ids, FOREVER_S / 2)
        if answer.fetch_from_id is not None:
            holder = self._workers[answer.fetch_from_id]
            num_held = holder.leading_blocks(request.block_ids, FOREVER_S / 2)
            if num_held > num_cached:
                num_bytes = (num_held - num_cached) * MOONCAKE_BLOCK_SIZE * KV_BYTES_PER_TOKEN
                ready_s = max(holder.ready_s[block_id] for block_id in request.block_ids[:num_held])
                start_s = max(now_s, ready_s) + self._setting.link.ms(num_bytes) / 1000
                num_cached = num_held
        num_cached = min(num_cached, (request.num_prompt_tokens - 1) // MOONCAKE_BLOCK_SIZE)
        ttft_s = worker.serve(request, num_cached, start_s).finished_s - now_s
        self.ttft_s.append(ttft_s)
        self.errors_s.append(abs(ttft_s - answer.predicted.ttft_ms / 1000))
        self.num_hits += num_cached
        self.num_blocks += len(request.block_ids)


def replay_rows(
    requests: Sequence[TraceRequest], setting: Setting, knowledge: Knowledge, names: Sequence[str]
) -> list[Row]:
    """Each policy over the whole trace."""
    rows = []
    for name in names:
        replay = Replay(setting, knowledge, POLICIES[name](), seed=0)
        replay.run(requests)
        found = percentiles(replay.ttft_s)
        assert found is not None
        published = PUBLISHED_MEAN_TTFT_S.get(name) if knowledge is EXACT else None
        workload = f"conversation trace, {knowledge.name}"
        rows += [
            Row(workload, name, "mean TTFT (floor: published)", found.mean, "s", floor=published),
            Row(workload, name, "p99 TTFT", found.p99, "s"),
            Row(workload, name, "block hit rate", replay.num_hits / replay.num_blocks, ""),
            Row(workload, name, "mean |error| of predicted TTFT", statistics.mean(replay.errors_s), "s"),
        ]
    return rows


def decision_rows(sizes: Sequence[int], num_decisions: int = 300) -> list[Row]:
    """A 12k-token prompt; half the workers prefill; all hold its first blocks, a tenth hold more."""
    rows = []
    for num_workers in sizes:
        load = ForeignLoad()
        samples = _time_decisions(num_workers, num_decisions)
        found = percentiles([sample * 1e6 for sample in samples])
        assert found is not None
        foreign = load.cores()
        for metric, value in (("p50 of a decision", found.p50), ("p99 of a decision", found.p99)):
            rows.append(Row(f"{num_workers} workers", "predicted cost", metric, value, "us", foreign_cores=foreign))
    return rows


def _time_decisions(num_workers: int, num_decisions: int) -> list[float]:
    source = random.Random(0)
    pairer = _busy_fleet(num_workers, source)
    samples = []
    for number in range(num_decisions):
        leading = {f"w{i}": source.randrange(32, 700) if source.random() < 0.1 else 32 for i in range(num_workers)}
        request = RequestShape(
            request_id=str(number), num_tokens=12_000, num_expected_output=300, leading_blocks=leading
        )
        pairer.settle(Settlement(request_id=str(number - 16)))
        started_s = time.perf_counter()
        answer = pairer.pair(request, 0.01)
        samples.append(time.perf_counter() - started_s)
        assert isinstance(answer, Pairing), answer
    return samples


def _busy_fleet(num_workers: int, source: random.Random) -> Pairer:
    speed = Speed(PrefillSpeed(5, 0.05, 1e-6), DecodeSpeed(8, 0.05, 5e-5))
    fleet = Fleet(AdmissionLimits(), Links(LinkState(20e9, 0.5)), lambda kind: speed)
    for i in range(num_workers):
        fleet.report(
            WorkerState(
                worker_id=f"w{i}",
                role=Role.PREFILL if i % 2 else Role.DECODE,
                kind="gpu",
                fingerprint="model",
                block_size=16,
                block_bytes=2_000_000,
                chunk_tokens=2048,
                num_total_blocks=100_000,
                num_free_blocks=50_000,
                queued=PrefillWork.of(source.randrange(1, 30_000), 0),
                num_running=source.randrange(40),
                num_context_tokens=source.randrange(200_000),
            )
        )
    for _ in range(2 * num_workers):
        pair = (f"w{source.randrange(num_workers)}", f"w{source.randrange(num_workers)}")
        fleet.links.update(*pair, LinkState(source.choice([1e9, 10e9, 40e9]), 0.1))
    return Pairer(fleet, PredictedCost())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, help="Mooncake trace to replay; without it only decisions are timed")
    parser.add_argument("--num-requests", type=int, help="replay only the first so many")
    parser.add_argument("--num-workers", type=int, default=16)
    parser.add_argument("--flops", type=float, default=0.6e15, help="effective FLOP/s of one prefill worker")
    parser.add_argument("--cache-blocks", type=int, default=3000, help="512-token blocks each worker can cache")
    parser.add_argument("--link-bytes-per-s", type=float, default=25e9)
    parser.add_argument("--policies", nargs="*", default=list(POLICIES), choices=list(POLICIES))
    parser.add_argument("--exact-only", action="store_true", help="leave the replays with stale knowledge out")
    parser.add_argument("--sizes", type=int, nargs="*", default=[8, 64, 1024, 10_000], help="fleets to time")
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    prioritise()
    setting = Setting(
        arguments.num_workers, arguments.flops, arguments.cache_blocks, LinkState(arguments.link_bytes_per_s, 1.0)
    )
    rows = decision_rows(arguments.sizes)
    if arguments.trace is not None:
        spread = spread_in_ticks(read_mooncake(arguments.trace), random.Random(0))
        requests = list(islice(spread, arguments.num_requests))
        for knowledge in (EXACT,) if arguments.exact_only else (EXACT, STALE, STALE_UNCOUNTED):
            rows += replay_rows(requests, setting, knowledge, arguments.policies)
    config = {key: str(value.name if isinstance(value, Path) else value) for key, value in vars(arguments).items()}
    report = Report("routing", config, rows, notes=_NOTES)
    report.print()
    if arguments.save:
        print(report.save())


_NOTES = (
    "Assumed: a 70B dense model, its time model known exactly; the workers' FLOP/s are the one free parameter.",
    "Arrivals are spread at random inside the trace's 3 s ticks. 'floor' is the published mean for exact knowledge.",
)


if __name__ == "__main__":
    main()
