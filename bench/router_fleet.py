"""A real router over simulated workers, which exist as reports only: for `bench.pairing` and `bench.churn`."""

import random
import time
from array import array
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

from tandem.core.chain_hasher import ChainHasher
from tandem.core.clock import Clock, SystemClock
from tandem.core.errors import ConfigurationError
from tandem.core.scope import UNSCOPED
from tandem.locality.base import LocalityIndex
from tandem.process.fleet_view import FleetView
from tandem.process.fleet_watch import FleetWatch
from tandem.router.metrics import RouterMetrics
from tandem.router.prefix_lookup import PrefixLookup
from tandem.router.service import RouterService
from tandem.routing.admission import AdmissionLimits
from tandem.routing.calibration import Calibration
from tandem.routing.fleet import Fleet
from tandem.routing.pairing import Pairer
from tandem.routing.policies import PredictedCost
from tandem.routing.settlement import Settlement
from tandem.routing.snapshot import Links, LinkState, RequestShape, Role, WorkerState
from tandem.routing.speed import DecodeSpeed, PrefillSpeed, PrefillWork, Speed
from tandem.rpc import methods
from tandem.rpc.client import RouterClient, WorkerClient, client_of
from tandem.rpc.messages import ModelInfo, PairCall, StepSample, WorkerAddress, WorkerStatus
from tandem.rpc.server import serve_router, serve_worker
from tests.helpers.secret import AS_GATEWAY, AS_ROUTER, AS_WORKER

BLOCK_SIZE = 16
NUM_PROMPTS = 100
NUM_HOLDERS = 8
SHARED_BLOCKS = 64
MEASURED_LINKS = 8
FOREVER_S = 1e6
ASKED_PER_REPORT = 50  # 200 requests a second
REPORTS_TIMED = 2000
SPEED = Speed(PrefillSpeed(2.0, 0.05, 1e-6), DecodeSpeed(5.0, 0.05, 5e-5))
MODEL = ModelInfo(name="m", fingerprint="f", max_model_len=1 << 17, vocab_size=150_000, block_size=BLOCK_SIZE)


@dataclass(frozen=True, slots=True)
class Size:
    """Size of the fleet and the index."""

    num_workers: int
    num_replicas: int
    num_prompt_tokens: int = 12_000

    @property
    def label(self) -> str:
        return f"{self.num_workers} workers, {self.num_replicas / 1e6:g} M block replicas"


class RouterFleet:
    """A router over one index; `fill` says what the workers hold."""

    def __init__(self, index: LocalityIndex, is_remote: bool, size: Size, clock: Clock | None = None) -> None:
        self.size = size
        self._index, self._random, self._clock = index, random.Random(1), clock or SystemClock()
        calibration = Calibration(SPEED)
        limits = AdmissionLimits(fresh_s=FOREVER_S, dead_s=FOREVER_S, forget_s=FOREVER_S)
        self._fleet = Fleet(limits, Links(LinkState(1e9, 0.2)), calibration.speed)
        self._view = FleetView(self._fleet, calibration, self._clock, dead_s=FOREVER_S)
        self._hasher, self._stranger = ChainHasher(), ChainHasher(max_stretches=1)
        self._lookup = PrefixLookup(index, is_remote=is_remote, timeout_s=5.0)
        self._pairer = Pairer(self._fleet, PredictedCost())
        watch = FleetWatch([], partial(client_of, credentials=AS_ROUTER), self._view, self._lookup.remove_worker)
        self.router = RouterService(self._view, watch, self._pairer, self._lookup, None, RouterMetrics(), self._clock)
        self._names = [f"worker-{i}" for i in range(size.num_workers)]
        self._report_all()
        self._measure_links()
        self._root = self._view.chains("m")[0].root(UNSCOPED)
        shared = self._tokens(SHARED_BLOCKS * BLOCK_SIZE)
        self._prompts = [self._tokens(size.num_prompt_tokens) for _ in range(NUM_PROMPTS // 2)]
        self._prompts += [
            shared + self._tokens(size.num_prompt_tokens - len(shared)) for _ in range(NUM_PROMPTS - NUM_PROMPTS // 2)
        ]

    def close(self) -> None:
        self._lookup.close()

    def fill(self) -> None:
        """Half of the prompts begin alike, and every worker holds that beginning; eight hold more of each prompt."""
        prompts: dict[str, list[Sequence[bytes]]] = {name: [] for name in self._names}
        for prompt in self._prompts:
            hashes = self._hasher.hashes(self._root, prompt, BLOCK_SIZE)
            for name in self._random.sample(self._names, NUM_HOLDERS):
                prompts[name].append(hashes[: self._random.choice([len(hashes), len(hashes) // 2, 80])])
        shared = self._hasher.hashes(self._root, self._prompts[-1], BLOCK_SIZE)[:SHARED_BLOCKS]
        num_least = sum(len(blocks) for held in prompts.values() for blocks in held) + len(shared) * len(self._names)
        if num_least > self.size.num_replicas:
            raise ConfigurationError(f"{self.size.label}: the prompts alone are {num_least:,} replicas; ask for more")
        for name in self._names:
            held = [block for blocks in (shared, *prompts[name]) for block in blocks]
            num_others = max(0, self.size.num_replicas // self.size.num_workers - len(held))
            others = self._random.randbytes(32 * num_others)
            held += [others[i : i + 32] for i in range(0, len(others), 32)]
            self._index.replace(name, 1, held, 0)

    async def round(self, num_asked: int) -> tuple[dict[str, list[float]], float]:
        """(Seconds of each part of each pairing, processor time of `all`, threads included)."""
        parts: dict[str, list[float]] = {"all": [], "all, prefix everywhere": [], "all, over gRPC": []}
        parts |= {"hashing, never seen": [], "hashing": [], "index": [], "decision": []}
        cpu_s = 0.0
        server = await serve_router(self.router, "127.0.0.1:0", AS_ROUTER)
        client = RouterClient(server.address, AS_GATEWAY)
        for number in range(num_asked):
            if number % ASKED_PER_REPORT == 0:
                self._report_all()
            call = self._call(f"{number}")
            began_s, began_cpu_s = time.perf_counter(), time.process_time()
            await self.router.pair(call)
            is_everywhere = number % NUM_PROMPTS >= NUM_PROMPTS // 2
            parts["all, prefix everywhere" if is_everywhere else "all"].append(time.perf_counter() - began_s)
            cpu_s += time.process_time() - began_cpu_s
            await self._time_parts(number, parts)
            if number % 10 == 0:
                began_s = time.perf_counter()
                await client.pair(replace(call, request_id=f"remote {number}"))
                parts["all, over gRPC"].append(time.perf_counter() - began_s)
        await client.close()
        await server.stop()
        return parts, cpu_s

    def reports(self, rounds: int) -> dict[str, tuple[float, ...]]:
        """Microseconds of processor time of one report's parts; the second brings a sample for the calibration."""
        form, status = methods.WATCH.answer, self._status(1)
        sampled = replace(
            status, step_samples=(StepSample(num_running=10, num_context_tokens=10_000, duration_s=0.01),)
        )
        data = form.encode(sampled)

        def spent_us(act: object) -> float:
            assert callable(act)
            began_s = time.thread_time()
            for _ in range(REPORTS_TIMED):
                act()
            return (time.thread_time() - began_s) / REPORTS_TIMED * 1e6

        acts = {
            "read from the wire": lambda: form.decode(data),
            "taken": lambda: self._view.update("worker-1:1", status),
            "taken, with a sample": lambda: self._view.update("worker-1:1", sampled),
        }
        return {name: tuple(spent_us(act) for _ in range(rounds)) for name, act in acts.items()}

    async def streamed_reports(self, rounds: int) -> tuple[float, ...]:
        """Microseconds of processor time of one report through a stream, worker's and router's side together."""
        worker = _Reporter(self._status(1))
        server = await serve_worker(worker, "127.0.0.1:0", AS_WORKER)  # type: ignore[arg-type]
        client = WorkerClient(server.address, AS_ROUTER)
        samples = []
        for _ in range(rounds):
            began_s = time.process_time()
            async for status in client.watch(0.25):
                self._view.update("worker-1:1", status)
            samples.append((time.process_time() - began_s) / REPORTS_TIMED * 1e6)
        await client.close()
        await server.stop()
        return tuple(samples)

    async def _time_parts(self, number: int, parts: dict[str, list[float]]) -> None:
        fresh, tokens = self._tokens(self.size.num_prompt_tokens), self._prompts[number % NUM_PROMPTS]
        times_s = [time.perf_counter()]
        self._stranger.hashes(self._root, fresh, BLOCK_SIZE)
        times_s.append(time.perf_counter())
        hashes = self._hasher.hashes(self._root, tokens, BLOCK_SIZE)
        times_s.append(time.perf_counter())
        leading = await self._lookup.leading_blocks(hashes)
        times_s.append(time.perf_counter())
        shape = RequestShape(
            request_id=f"decided {number}", num_tokens=len(tokens), num_expected_output=200, leading_blocks=leading
        )
        self._pairer.pair(shape, self._clock.now_s())
        times_s.append(time.perf_counter())
        assert len(leading) >= min(NUM_HOLDERS, self.size.num_workers), leading
        names = ("hashing, never seen", "hashing", "index", "decision")
        for part, (began_s, ended_s) in zip(names, pairwise(times_s), strict=True):
            parts[part].append(ended_s - began_s)
        for request_id in (f"decided {number}", f"{number}"):
            self._pairer.settle(Settlement(request_id=request_id))

    def _call(self, request_id: str) -> PairCall:
        tokens = self._prompts[int(request_id) % NUM_PROMPTS]
        return PairCall(request_id=request_id, model="m", token_ids=tokens, num_expected_output=200, scope=UNSCOPED)

    def _tokens(self, count: int) -> "array[int]":
        """As the wire brings them."""
        return array("I", (self._random.randrange(150_000) for _ in range(count)))

    def _report_all(self) -> None:
        """Updates of every worker, as they come four times a second."""
        for i, name in enumerate(self._names):
            self._view.update(f"{name}:1", self._status(i))

    def _measure_links(self) -> None:
        prefills = self._names[1::2]
        for decode in self._names[::2]:
            for prefill in self._random.sample(prefills, min(MEASURED_LINKS, len(prefills))):
                self._fleet.links.update(prefill, decode, LinkState(self._random.uniform(0.8e10, 1.2e10), 0.1))

    def _status(self, i: int) -> WorkerStatus:
        return reported(self._names[i], Role.PREFILL if i % 2 else Role.DECODE, self._random, self._clock.now_s())


def reported(worker_id: str, role: Role, source: random.Random, now_s: float, epoch: int = 1) -> WorkerStatus:
    """A worker's status at some load or other."""
    queued = source.randrange(30_000) if role is Role.PREFILL else 0
    state = WorkerState(
        worker_id=worker_id,
        role=role,
        kind="k",
        fingerprint="pool",
        block_size=BLOCK_SIZE,
        block_bytes=1 << 20,
        chunk_tokens=2048,
        num_total_blocks=100_000,
        num_free_blocks=80_000,
        queued=PrefillWork(1, queued, queued**2 / 2) if queued else PrefillWork(),
        num_running=source.randrange(40),
        num_context_tokens=source.randrange(200_000),
        reported_at_s=now_s,
    )
    address = WorkerAddress(worker_id, "", f"{epoch}")
    return WorkerStatus(worker=address, pid=1, epoch=epoch, lifecycle="ready", state=state, model=MODEL)


class _Reporter:
    """A worker that has nothing to do but to report."""

    def __init__(self, status: WorkerStatus) -> None:
        self._status = status

    def __getattr__(self, name: str) -> object:
        return None

    async def watch(self, interval_s: float) -> AsyncIterator[WorkerStatus]:
        for _ in range(REPORTS_TIMED):
            yield self._status
