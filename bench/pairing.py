"""Benchmark of pairing as fleet and index grow: hashing, the index, the decision, a worker's report.

    python -m bench.pairing [--workers 64 1024] [--replicas 1000000] [--prompt-tokens 12000] [--large] [--save]

Half of the workers prefill, half decode. Every prompt is held in part by eight of them; "everywhere": and its first 64
blocks by all. Each decode worker has measured the links from some prefill workers. The index is the embedded one, then
one in a real redis-server. Percentiles are taken in each of several rounds and the median round is shown. --large adds
10 M block replicas, and 10,000 workers: some minutes and about 3 GB.
"""

import argparse
import asyncio
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import psutil

from bench.load import ForeignLoad, prioritise
from bench.report import Report, Row
from bench.router_fleet import RouterFleet, Size
from tandem.locality.base import LocalityIndex
from tandem.locality.embedded import EmbeddedIndex
from tandem.locality.redis import RedisIndex
from tandem.router.process import relax_garbage_collector
from tests.helpers.redis_server import running_redis

ROUNDS = 5
LARGE = (Size(64, 10_000_000), Size(1024, 10_000_000), Size(10_000, 1_000_000), Size(10_000, 10_000_000))
AIM_US = 1000.0
AIM_BYTES = 100.0


@dataclass(frozen=True, slots=True)
class System:
    """An index and what it occupies and uses besides this process."""

    name: str
    index: LocalityIndex
    used_bytes: Callable[[], int]
    server_cpu_s: Callable[[], float]


def measure(system: System, size: Size, num_asked: int) -> Iterator[Row]:
    """Fill the index, then ask."""
    fleet, thresholds = RouterFleet(system.index, system.name == "redis", size), gc.get_threshold()
    try:
        yield _memory_row(system, fleet)
        relax_garbage_collector()  # NOTE: as a router does
        yield from _pairing_rows(system, fleet, num_asked)
        if system.name == "embedded":
            yield from _report_rows(fleet)
    finally:
        fleet.close()
        gc.unfreeze()
        gc.set_threshold(*thresholds)


def _memory_row(system: System, fleet: RouterFleet) -> Row:
    gc.collect()
    before_bytes = system.used_bytes()
    fleet.fill()
    gc.collect()
    num_replicas = system.index.stats().num_block_replicas
    value = (system.used_bytes() - before_bytes) / num_replicas
    return Row(fleet.size.label, system.name, "memory", value, "bytes/replica", AIM_BYTES)


def _pairing_rows(system: System, fleet: RouterFleet, num_asked: int) -> Iterator[Row]:
    foreign, began_s, server_s, own_s = ForeignLoad(), time.perf_counter(), system.server_cpu_s(), 0.0
    rounds: list[dict[str, list[float]]] = []
    for _ in range(ROUNDS):
        found, cpu_s = asyncio.run(fleet.round(num_asked))
        rounds.append(found)
        own_s += cpu_s
    wall_s, server_s = time.perf_counter() - began_s, system.server_cpu_s() - server_s
    busy = max(0.0, foreign.cores() - server_s / wall_s)
    for part in filter(rounds[0].get, rounds[0]):
        for percent in (50, 99):
            samples = tuple(_percentile(found[part], percent) for found in rounds)
            floor = AIM_US if part == "all" and percent == 99 else None
            value = statistics.median(samples)
            yield Row(fleet.size.label, system.name, f"{part}, p{percent}", value, "us", floor, None, samples, busy)
    num_paired = ROUNDS * num_asked
    yield Row(fleet.size.label, system.name, "pairings a core", num_paired / own_s, "1/s", foreign_cores=busy)


def _report_rows(fleet: RouterFleet) -> Iterator[Row]:
    """Processor time of the router for one report of a worker."""
    for part, samples in fleet.reports(ROUNDS).items():
        yield Row(fleet.size.label, "router", f"report, {part}", statistics.median(samples), "us", None, None, samples)
    samples = asyncio.run(fleet.streamed_reports(ROUNDS))
    yield Row(
        fleet.size.label, "router", "report over gRPC, both ends", statistics.median(samples), "us", samples=samples
    )


def _percentile(seconds: Sequence[float], percent: int) -> float:
    return sorted(seconds)[min(len(seconds) - 1, len(seconds) * percent // 100)] * 1e6


def embedded_rows(size: Size, num_asked: int) -> Iterator[Row]:
    process = psutil.Process()
    index = EmbeddedIndex(4 * size.num_replicas)
    yield from measure(System("embedded", index, lambda: process.memory_info().rss, lambda: 0.0), size, num_asked)


def redis_rows(size: Size, num_asked: int) -> Iterator[Row]:
    with running_redis() as server, server.client() as plain:
        index = RedisIndex(server.url, max_block_replicas=4 * size.num_replicas, read_timeout_s=5, write_timeout_s=60)

        def cpu_s() -> float:
            cpu = plain.info("cpu")
            return float(cpu["used_cpu_user"]) + float(cpu["used_cpu_sys"])

        yield from measure(System("redis", index, lambda: plain.info("memory")["used_memory"], cpu_s), size, num_asked)
        index.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="*", default=[64, 1024])
    parser.add_argument("--replicas", type=int, default=1_000_000, help="block replicas that all workers hold together")
    parser.add_argument("--prompt-tokens", type=int, default=12_000)
    parser.add_argument("--asked", type=int, default=500, help="requests a round")
    parser.add_argument("--large", action="store_true", help="10 M replicas and 10,000 workers too")
    parser.add_argument("--system", choices=("embedded", "redis"), action="append", help="repeatable; default: both")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    prioritise()
    sizes = [Size(num_workers, options.replicas, options.prompt_tokens) for num_workers in options.workers]
    rows: list[Row] = []
    for size in (*sizes, *(LARGE if options.large else ())):
        if "embedded" in (options.system or ("embedded",)):
            rows += embedded_rows(size, options.asked)
        if "redis" in (options.system or ("redis",)):
            rows += redis_rows(size, options.asked)
    report = Report("pairing", vars(options), rows, notes=("'floor' is the aim where there is one.",))
    report.print()
    if options.save:
        print(report.save())


if __name__ == "__main__":
    main()
