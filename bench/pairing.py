"""What the router takes to pair one request, from its tokens to an answer: hashing, the index, the decision.

    python -m bench.pairing [--workers 64] [--blocks 1000000] [--prompt-tokens 12000] [--save]

Half of the workers prefill, half decode; every prompt is held in part by eight of them, so that there is something to
weigh. The prompts are ones that the router has seen, as in conversations; hashing is also shown for new ones. The index
is the embedded one, then one in a real redis-server. Percentiles are taken in each of several rounds and the median
round is shown.
"""

import argparse
import asyncio
import random
import statistics
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.load import ForeignLoad, prioritise
from bench.report import Report, Row
from tandem.core.clock import SystemClock
from tandem.locality.base import LocalityIndex
from tandem.locality.embedded import EmbeddedIndex
from tandem.locality.redis import RedisIndex
from tandem.routing.admission import Limits
from tandem.routing.calibration import Calibration
from tandem.routing.fleet import Fleet
from tandem.routing.pairing import Pairer
from tandem.routing.policies import PredictedCost
from tandem.routing.snapshot import Links, LinkState, RequestShape, Role, WorkerState
from tandem.routing.speed import DecodeSpeed, PrefillSpeed, PrefillWork, Speed
from tandem.rpc.client import WorkerClient
from tandem.rpc.messages import ModelInfo, PairCall, WorkerAddress, WorkerStatus
from tandem.serving.chain_hasher import ChainHasher
from tandem.serving.fleet_view import Chain, FleetView
from tandem.serving.fleet_watch import FleetWatch
from tandem.serving.prefix_lookup import PrefixLookup
from tandem.serving.router import RouterService
from tandem.serving.router_metrics import RouterMetrics
from tests.helpers.redis_server import running_redis

ROUNDS = 5
BLOCK_SIZE = 16
NUM_PROMPTS = 100
NUM_HOLDERS = 8
FOREVER_S = 1e6
ASKED_PER_REPORT = 50  # 200 requests a second
SPEED = Speed(PrefillSpeed(2.0, 0.05, 1e-6), DecodeSpeed(5.0, 0.05, 5e-5))


@dataclass(frozen=True, slots=True)
class Size:
    """How much there is to weigh."""

    num_workers: int
    num_blocks: int
    num_prompt_tokens: int


class Bench:
    """A router over one index, filled; `size` says with what."""

    def __init__(self, index: LocalityIndex, is_remote: bool, size: Size) -> None:
        self._size, self._random = size, random.Random(1)
        self._clock = SystemClock()
        calibration = Calibration(SPEED)
        limits = Limits(fresh_s=FOREVER_S, dead_s=FOREVER_S, forget_s=FOREVER_S)
        self._fleet = Fleet(limits, Links(LinkState(1e9, 0.2)), calibration.speed)
        self._view = FleetView(self._fleet, calibration, self._clock, dead_s=FOREVER_S)
        self._hasher, self._stranger = ChainHasher(), ChainHasher(max_stretches=1)
        self._lookup = PrefixLookup(index, is_remote=is_remote, timeout_s=5.0)
        self._pairer = Pairer(self._fleet, PredictedCost())
        watch = FleetWatch([], WorkerClient, self._view, self._lookup.remove_worker)
        self._router = RouterService(self._view, watch, self._pairer, self._lookup, None, RouterMetrics(), self._clock)
        self._names = [f"worker-{i}" for i in range(size.num_workers)]
        self._report()
        for source in self._names:
            for reader in self._names:
                if source != reader:
                    self._fleet.links.update(source, reader, LinkState(self._random.choice([1e9, 1e10, 4e10]), 0.1))
        self._chain: Chain = self._view.chains("m")[0]
        self._prompts = [self._prompt() for _ in range(NUM_PROMPTS)]
        self._fill(index)

    def close(self) -> None:
        self._lookup.close()

    async def round(self, num_asked: int) -> dict[str, list[float]]:
        """Seconds of each part of each decision."""
        parts: dict[str, list[float]] = {
            "hashing, never seen": [],
            "hashing": [],
            "index": [],
            "decision": [],
            "index and decision": [],
            "all": [],
        }
        for number in range(num_asked):
            if number % ASKED_PER_REPORT == 0:
                self._report()
            tokens = self._prompts[number % NUM_PROMPTS]
            fresh = self._prompt()
            fresh_s = time.perf_counter()
            self._stranger.hashes(self._chain, fresh)
            began_s = time.perf_counter()
            hashes = self._hasher.hashes(self._chain, tokens)
            hashed_s = time.perf_counter()
            leading = await self._lookup.leading_blocks(hashes)
            found_s = time.perf_counter()
            shape = RequestShape(
                request_id=f"decided {number}", num_tokens=len(tokens), num_expected_output=200, leading_blocks=leading
            )
            self._pairer.pair(shape, self._clock.now_s())
            decided_s = time.perf_counter()
            assert len(leading) >= NUM_HOLDERS
            call = PairCall(request_id=str(number), model="m", token_ids=tokens, num_expected_output=200)
            started_s = time.perf_counter()
            answer = await self._router.pair(call)
            parts["all"].append(time.perf_counter() - started_s)
            assert answer.prefill_cached_blocks or answer.num_fetch_blocks or answer.prefill is None
            parts["hashing, never seen"].append(began_s - fresh_s)
            parts["hashing"].append(hashed_s - began_s)
            parts["index"].append(found_s - hashed_s)
            parts["decision"].append(decided_s - found_s)
            parts["index and decision"].append(decided_s - hashed_s)
        return parts

    def _prompt(self) -> "array[int]":
        """As the wire brings it."""
        return array("I", (self._random.randrange(150_000) for _ in range(self._size.num_prompt_tokens)))

    def _report(self) -> None:
        """News of every worker, as they come four times a second."""
        for i, name in enumerate(self._names):
            self._view.take(f"{name}:1", self._status(name, Role.PREFILL if i % 2 else Role.DECODE))

    def _fill(self, index: LocalityIndex) -> None:
        filler = self._size.num_blocks // self._size.num_workers
        held = {name: [self._random.randbytes(32) for _ in range(filler)] for name in self._names}
        for prompt in self._prompts:
            hashes = self._hasher.hashes(self._chain, prompt)
            for name in self._random.sample(self._names, NUM_HOLDERS):
                held[name] += hashes[: self._random.choice([len(hashes), len(hashes) // 2, 50])]
        for name, hashes in held.items():
            index.replace(name, 1, hashes, 0)

    def _status(self, name: str, role: Role) -> WorkerStatus:
        queued = self._random.randrange(30_000) if role is Role.PREFILL else 0
        state = WorkerState(
            worker_id=name,
            role=role,
            kind="k",
            fingerprint="pool",
            block_size=BLOCK_SIZE,
            block_bytes=1 << 20,
            chunk_tokens=2048,
            num_total_blocks=100_000,
            num_free_blocks=80_000,
            queued=PrefillWork(1, queued, queued**2 / 2) if queued else PrefillWork(),
            num_running=self._random.randrange(40),
            num_context_tokens=self._random.randrange(200_000),
            reported_at_s=self._clock.now_s(),
        )
        model = ModelInfo(name="m", fingerprint="f", max_model_len=1 << 17, vocab_size=150_000, block_size=BLOCK_SIZE)
        return WorkerStatus(
            worker=WorkerAddress(name, "", "1"), pid=1, epoch=1, lifecycle="ready", state=state, model=model
        )


def measure(system: str, open_bench: Callable[[], Bench], num_asked: int) -> list[Row]:
    """p50 and p99 of every part."""
    bench, foreign = open_bench(), ForeignLoad()
    try:
        rounds = [asyncio.run(bench.round(num_asked)) for _ in range(ROUNDS)]
    finally:
        bench.close()
    return [
        Row(
            "pair one request",
            system,
            f"{part}, p{percent}",
            statistics.median(samples := [_percentile(found[part], percent) for found in rounds]),
            "us",
            samples=tuple(samples),
            foreign_cores=foreign.cores(),
        )
        for part in rounds[0]
        for percent in (50, 99)
    ]


def _percentile(seconds: Sequence[float], percent: int) -> float:
    return sorted(seconds)[min(len(seconds) - 1, len(seconds) * percent // 100)] * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--prompt-tokens", type=int, default=12_000)
    parser.add_argument("--asked", type=int, default=500, help="requests a round")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    prioritise()
    size, bound = Size(options.workers, options.blocks, options.prompt_tokens), 4 * options.blocks
    rows = measure("embedded", lambda: Bench(EmbeddedIndex(bound), False, size), options.asked)
    with running_redis() as redis:
        index = RedisIndex(redis.url, max_block_replicas=bound, read_timeout_s=5.0, write_timeout_s=60.0)
        rows += measure("redis", lambda: Bench(index, True, size), options.asked)
        index.close()
    report = Report("pairing", vars(options), rows)
    report.print()
    if options.save:
        print(report.save())


if __name__ == "__main__":
    main()
