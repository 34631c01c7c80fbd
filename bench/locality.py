"""Benchmark of the locality index: speed and size, embedded and in a real redis-server on this machine.

A fleet of workers holds chains that share a system prompt; questions are a 12k-token prompt each (750 blocks of 16).
With --trace, replays a trace's `hash_ids` as one worker with an infinite cache: the share of all blocks, over requests
in order, that were leading blocks of the prompt already held. A row's floor is a bare round trip to the same Redis;
percentiles are taken in each of several rounds, and the median round is shown: tails are the first to feel neighbours.
"""

import argparse
import contextlib
import hashlib
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from redis import Redis

from bench.load import ForeignLoad, prioritise
from bench.report import Report, Row
from tandem.core.events import BlockRemoved, BlockStored
from tandem.locality.base import LocalityIndex, PublishResult
from tandem.locality.embedded import EmbeddedIndex
from tandem.locality.redis import RedisIndex
from tests.helpers.redis_server import RedisServer, running_redis

PROMPT_BLOCKS = 750
SHARED_BLOCKS = 64
REPORT_BLOCKS = 256
ROUNDS = 5
MAX_BLOCK_REPLICAS = 8_000_000
PATIENT_S = 10.0


@dataclass(frozen=True, slots=True)
class System:
    """One index and how to learn what it occupies."""

    name: str
    index: LocalityIndex
    occupied_bytes: Callable[[], int]
    round_trip: Callable[[], object] | None
    server_cpu_s: Callable[[], float]


@dataclass(frozen=True, slots=True)
class Fleet:
    """Holders of blocks: all hold the system prompt and one whole popular prompt, and each holds chains of its own."""

    num_workers: int
    num_block_replicas: int

    @property
    def chains_per_worker(self) -> int:
        common = PROMPT_BLOCKS
        return (self.num_block_replicas // self.num_workers - common) // (PROMPT_BLOCKS - SHARED_BLOCKS)

    def popular(self) -> list[bytes]:
        return chain(b"", "popular", PROMPT_BLOCKS)

    def private(self, worker: int, number: int) -> list[bytes]:
        """A prompt that begins like the popular one and that one worker holds to the end."""
        shared = self.popular()[:SHARED_BLOCKS]
        return shared + chain(shared[-1], f"{worker}/{number}", PROMPT_BLOCKS - SHARED_BLOCKS)

    def held_by(self, worker: int) -> Iterator[bytes]:
        yield from self.popular()
        for number in range(self.chains_per_worker):
            yield from self.private(worker, number)[SHARED_BLOCKS:]


def chain(parent: bytes, name: str, length: int) -> list[bytes]:
    """`length` chained block hashes."""
    hashes = []
    for index in range(length):
        parent = hashlib.sha256(parent + f"{name} {index}".encode()).digest()
        hashes.append(parent)
    return hashes


def fill(index: LocalityIndex, fleet: Fleet) -> float:
    """Send every worker's snapshot; seconds spent inside the index."""
    spent_s = 0.0
    for worker in range(fleet.num_workers):
        hashes = list(fleet.held_by(worker))
        started_s = time.perf_counter()
        result = index.replace(f"worker-{worker}", 1, hashes, 0)
        spent_s += time.perf_counter() - started_s
        assert result is PublishResult.APPLIED, result
    return spent_s


def questions(fleet: Fleet, num_asked: int) -> dict[str, list[tuple[list[bytes], int, int]]]:
    """By kind: prompts, how many workers hold the start of each, and the longest prefix any of them holds."""
    rng = random.Random(1)
    unknown = [chain(b"", f"unknown {number}", PROMPT_BLOCKS) for number in range(num_asked)]
    shared = fleet.popular()[:SHARED_BLOCKS]
    private = [
        fleet.private(rng.randrange(fleet.num_workers), rng.randrange(fleet.chains_per_worker))
        for _ in range(num_asked)
    ]
    all_workers = fleet.num_workers
    return {
        "unknown prompt": [(blocks, 0, 0) for blocks in unknown],
        f"{SHARED_BLOCKS} blocks everywhere, then unknown": [
            (shared + blocks[SHARED_BLOCKS:], all_workers, SHARED_BLOCKS) for blocks in unknown
        ],
        f"{SHARED_BLOCKS} blocks everywhere, all on one": [(blocks, all_workers, PROMPT_BLOCKS) for blocks in private],
        "all blocks everywhere": [(fleet.popular(), all_workers, PROMPT_BLOCKS)] * num_asked,
    }


def ask(index: LocalityIndex, asked: Sequence[tuple[list[bytes], int, int]]) -> list[float]:
    """Seconds each question took; answers are checked."""
    samples = []
    for blocks, num_workers, longest in asked:
        started_s = time.perf_counter()
        leading = index.leading_blocks(blocks)
        samples.append(time.perf_counter() - started_s)
        assert len(leading) == num_workers, leading
        assert max(leading.values(), default=0) == longest, leading
    return samples


def publish_rate(index: LocalityIndex, num_reports: int = 200) -> float:
    """Events per second of one worker that evicts a block for each that it stores."""
    hashes = chain(b"", "churn", num_reports * REPORT_BLOCKS)
    index.replace("churning", 1, [], 0)
    started_s = time.perf_counter()
    for sequence in range(num_reports):
        new = hashes[sequence * REPORT_BLOCKS : (sequence + 1) * REPORT_BLOCKS]
        old = hashes[max(sequence - 1, 0) * REPORT_BLOCKS : sequence * REPORT_BLOCKS]
        events = [BlockStored(block, None, 0) for block in new] + [BlockRemoved(block, 0) for block in old]
        assert index.publish("churning", 1, events, sequence + 1) is PublishResult.APPLIED
    spent_s = time.perf_counter() - started_s
    index.remove_worker("churning")
    return 2 * num_reports * REPORT_BLOCKS / spent_s


def replay(index: LocalityIndex, trace: Path) -> tuple[float, list[float]]:
    """Hit rate over all blocks, and the seconds of each request's question and report together."""
    num_hits = num_blocks = 0
    samples = []
    index.replace("infinite", 1, [], 0)
    for sequence, line in enumerate(trace.read_text().splitlines()):
        blocks = [hashlib.sha256(b"%d" % hash_id).digest() for hash_id in json.loads(line)["hash_ids"]]
        started_s = time.perf_counter()
        held = index.leading_blocks(blocks).get("infinite", 0)
        index.publish("infinite", 1, [BlockStored(block, None, 0) for block in blocks[held:]], sequence + 1)
        samples.append(time.perf_counter() - started_s)
        num_hits += held
        num_blocks += len(blocks)
    index.remove_worker("infinite")
    return num_hits / num_blocks, samples


def latency_rows(
    workload: str,
    system: str,
    rounds: Sequence[Sequence[float]],
    floor_ms: float | None = None,
    foreign: float | None = None,
) -> Iterator[Row]:
    cuts = [statistics.quantiles(samples, n=100, method="inclusive") for samples in rounds]
    for metric, cut in (("p50", 49), ("p99", 98)):
        values_ms = tuple(1000 * percentiles[cut] for percentiles in cuts)
        value_ms = statistics.median(values_ms)
        share = None if floor_ms is None else floor_ms / value_ms
        yield Row(workload, system, metric, value_ms, "ms", floor_ms, share, values_ms, foreign)


def question_rows(system: System, fleet: Fleet, num_asked: int) -> Iterator[Row]:
    floor_ms = None
    if system.round_trip is not None:
        floor_ms = 1000 * statistics.median(_seconds(system.round_trip) for _ in range(num_asked))
    for kind, asked in questions(fleet, num_asked).items():
        load, started_s, server_s = ForeignLoad(), time.perf_counter(), system.server_cpu_s()
        rounds = [ask(system.index, asked) for _ in range(ROUNDS)]
        server_share = (system.server_cpu_s() - server_s) / (time.perf_counter() - started_s)
        yield from latency_rows(kind, system.name, rounds, floor_ms, max(0.0, load.cores() - server_share))


def measure(system: System, fleet: Fleet, num_asked: int, trace: Path | None) -> Iterator[Row]:
    before_bytes = system.occupied_bytes()
    spent_s = fill(system.index, fleet)
    num_replicas = system.index.stats().num_block_replicas
    size_bytes = (system.occupied_bytes() - before_bytes) / num_replicas
    scale = f"{num_replicas / 1e6:.2f} M block replicas, {fleet.num_workers} workers"
    yield Row(scale, system.name, "memory", size_bytes, "bytes/replica")
    yield Row(scale, system.name, "snapshots", num_replicas / spent_s, "blocks/s")
    yield from question_rows(system, fleet, num_asked)
    yield Row(f"reports of {2 * REPORT_BLOCKS}", system.name, "publish", publish_rate(system.index), "events/s")
    if trace is not None:
        hit_rate, samples = replay(system.index, trace)
        yield Row(trace.stem, system.name, "block hit rate", hit_rate * 100, "%")
        yield Row(trace.stem, system.name, "ask and publish", len(samples) / sum(samples), "requests/s")
        yield from latency_rows(trace.stem, system.name, [samples])


@contextlib.contextmanager
def embedded() -> Iterator[System]:
    process = psutil.Process(os.getpid())
    index = EmbeddedIndex(MAX_BLOCK_REPLICAS)
    yield System("embedded", index, lambda: int(process.memory_info().rss), None, lambda: 0.0)


@contextlib.contextmanager
def in_redis() -> Iterator[System]:
    with running_redis() as server, contextlib.closing(server.client()) as plain:
        plain.ping()
        with contextlib.closing(_open(server)) as index:
            yield System("redis", index, lambda: _used_bytes(plain), plain.ping, lambda: _cpu_s(plain))


def _used_bytes(plain: Redis) -> int:
    return int(plain.info("memory")["used_memory"])


def _cpu_s(plain: Redis) -> float:
    cpu = plain.info("cpu")
    return float(cpu["used_cpu_user"]) + float(cpu["used_cpu_sys"])


def _open(server: RedisServer) -> RedisIndex:
    return RedisIndex(
        server.url, max_block_replicas=MAX_BLOCK_REPLICAS, read_timeout_s=PATIENT_S, write_timeout_s=PATIENT_S
    )


def _seconds(call: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    call()
    return time.perf_counter() - started_s


SYSTEMS = {"embedded": embedded, "redis": in_redis}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--system", choices=SYSTEMS, action="append", default=[], help="repeatable; default: both")
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--replicas", type=int, default=1_000_000, help="block replicas that all workers hold together")
    parser.add_argument("--asked", type=int, default=300, help="questions of each kind in a round")
    parser.add_argument("--trace", type=Path, help="a trace in Mooncake's JSON lines, to replay its hash_ids")
    parser.add_argument("--save", action="store_true", help="keep the JSON under bench/results")
    arguments = parser.parse_args()
    prioritise()
    rows: list[Row] = []
    for name in arguments.system or SYSTEMS:
        with SYSTEMS[name]() as system:
            rows += measure(system, Fleet(arguments.workers, arguments.replicas), arguments.asked, arguments.trace)
    config = {
        "workers": arguments.workers,
        "replicas": arguments.replicas,
        "prompt_blocks": PROMPT_BLOCKS,
        "asked": arguments.asked,
    }
    report = Report("locality", config, rows)
    report.print()
    if arguments.save:
        print(f"saved {report.save().relative_to(Path.cwd())}")


if __name__ == "__main__":
    main()
