"""Whether a router's memory stays flat over an hour of churn: workers come, go, restart and evict; requests get lost.

    python -m bench.churn [--workers 96] [--minutes 60] [--save]

The hour passes on a virtual clock, in a minute or two of real time. Every second each worker reports and requests are
paired, a tenth of which is never settled; every four seconds a worker exchanges some of its blocks; every five a
worker dies for good and a new one comes, or restarts under its id. Resident memory is read every five minutes.
"""

import argparse
import asyncio
import gc
import random
import time
from array import array
from collections import deque
from dataclasses import dataclass, field, replace
from functools import partial

import psutil

from bench.load import prioritise
from bench.report import Report, Row
from bench.router_fleet import SPEED, reported
from tandem.core.clock import ManualClock
from tandem.core.events import BlockRemoved, BlockStored
from tandem.core.scope import UNSCOPED
from tandem.locality.base import PublishResult
from tandem.locality.embedded import EmbeddedIndex
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
from tandem.routing.snapshot import Links, LinkState, Role
from tandem.rpc.client import client_of
from tandem.rpc.messages import LinkReport, PairCall, StepSample
from tests.helpers.secret import AS_ROUTER

HELD_BLOCKS = 500
EXCHANGED_BLOCKS = 64
PAIRED_PER_S = 5
PROMPT_TOKENS = 2000
READ_EVERY_S = 300


@dataclass(slots=True)
class Worker:
    """One incarnation."""

    worker_id: str
    role: Role
    epoch: int = 1
    sequence: int = 0
    held: deque[bytes] = field(default_factory=deque)


class Churn:
    """A router and its fleet; `second` is one of the virtual clock."""

    def __init__(self, num_workers: int) -> None:
        self._random, self._clock = random.Random(1), ManualClock()
        self.index = EmbeddedIndex(max(4096, 3 * num_workers * HELD_BLOCKS))
        calibration = Calibration(SPEED)
        self._fleet = Fleet(AdmissionLimits(), Links(LinkState(1e9, 0.2)), calibration.speed)
        self.view = FleetView(self._fleet, calibration, self._clock)
        self._lookup = PrefixLookup(self.index, is_remote=False)
        watch = FleetWatch([], partial(client_of, credentials=AS_ROUTER), self.view, self._lookup.remove_worker)
        pairer = Pairer(self._fleet, PredictedCost())
        self._router = RouterService(self.view, watch, pairer, self._lookup, None, RouterMetrics(), self._clock)
        self._num_born = self._num_asked = 0
        self._workers = [self._born() for _ in range(num_workers)]

    def close(self) -> None:
        self._lookup.close()

    async def second(self, number: int) -> None:
        self._clock.advance(1.0)
        if number % 5 == 0:
            self._replace_one(is_restart=number % 10 == 0)
        for worker in self._workers:
            self._report(worker)
        for worker in self._workers[number % 4 :: 4]:
            self._exchange(worker)
        for _ in range(PAIRED_PER_S):
            await self._pair()
        for worker_id, _ in self.view.forgettable():
            await self._lookup.remove_worker(worker_id)
            self.view.forget(worker_id)

    def _born(self) -> Worker:
        self._num_born += 1
        role = Role.PREFILL if self._num_born % 2 else Role.DECODE
        return self._filled(Worker(f"worker-{self._num_born}", role))

    def _filled(self, worker: Worker) -> Worker:
        worker.held = deque(self._random.randbytes(32) for _ in range(HELD_BLOCKS))
        assert self.index.replace(worker.worker_id, worker.epoch, worker.held, 0) is PublishResult.APPLIED
        return worker

    def _replace_one(self, is_restart: bool) -> None:
        place = self._random.randrange(len(self._workers))
        former = self._workers[place]
        self.view.mark_lost(f"{former.worker_id}:1")
        restarted = Worker(former.worker_id, former.role, former.epoch + 1)
        self._workers[place] = self._filled(restarted) if is_restart else self._born()

    def _report(self, worker: Worker) -> None:
        sources = self._random.sample(self._workers, 2)
        links = tuple(
            LinkReport(
                source_id=source.worker_id,
                transport="tcp",
                path="tcp",
                bytes_per_s=self._random.uniform(1e9, 1e10),
                latency_s=1e-4,
                is_slow=False,
            )
            for source in sources
        )
        sample = StepSample(num_running=8, num_context_tokens=10_000, duration_s=self._random.uniform(0.005, 0.02))
        status = reported(worker.worker_id, worker.role, self._random, self._clock.now_s(), epoch=worker.epoch)
        self.view.update(f"{worker.worker_id}:1", replace(status, links=links, step_samples=(sample,)))

    def _exchange(self, worker: Worker) -> None:
        new = [self._random.randbytes(32) for _ in range(EXCHANGED_BLOCKS)]
        old = [worker.held.popleft() for _ in new]
        worker.held.extend(new)
        worker.sequence += 1
        events = [BlockStored(block, None, 0) for block in new] + [BlockRemoved(block, 0) for block in old]
        result = self.index.publish(worker.worker_id, worker.epoch, events, worker.sequence)
        assert result is PublishResult.APPLIED, result

    async def _pair(self) -> None:
        self._num_asked += 1
        tokens = array("I", self._random.randbytes(4 * PROMPT_TOKENS))
        call = PairCall(
            request_id=str(self._num_asked), model="m", token_ids=tokens, num_expected_output=200, scope=UNSCOPED
        )
        await self._router.pair(call)
        if self._num_asked % 10:
            await self._router.settle(Settlement(request_id=call.request_id, ttft_ms=200.0))


async def measure(num_workers: int, num_minutes: int) -> list[Row]:
    """Resident memory every five virtual minutes, and what the second half of the time added."""
    churn, process, label = Churn(num_workers), psutil.Process(), f"{num_workers} workers, churn"
    rows, sizes_mb, began_s = list[Row](), list[float](), time.perf_counter()
    for number in range(1, 60 * num_minutes + 1):
        await churn.second(number)
        if number % READ_EVERY_S == 0:
            gc.collect()
            sizes_mb.append(process.memory_info().rss / 1e6)
            stats = churn.index.stats()
            minute = f"minute {number // 60}"
            rows.append(Row(label, "router", f"resident, {minute}", sizes_mb[-1], "MB"))
            rows.append(Row(label, "router", f"block replicas, {minute}", stats.num_block_replicas, "blocks"))
    rows.append(Row(label, "router", "workers listed at the end", len(churn.view.listings()), "workers"))
    half = len(sizes_mb) // 2
    rows.append(Row(label, "router", "growth in the second half", sizes_mb[-1] - sizes_mb[half - 1], "MB"))
    rows.append(Row(label, "router", "real time", time.perf_counter() - began_s, "s"))
    churn.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=96)
    parser.add_argument("--minutes", type=int, default=60, help="virtual")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    if 60 * options.minutes < 2 * READ_EVERY_S:
        parser.error(f"--minutes {options.minutes}: growth takes two readings, {2 * READ_EVERY_S // 60} minutes")
    prioritise()
    report = Report("churn", vars(options), asyncio.run(measure(options.workers, options.minutes)))
    report.print()
    if options.save:
        print(report.save())


if __name__ == "__main__":
    main()
