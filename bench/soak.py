"""Memory of a real gateway process under mixed traffic, in front of an engine that answers at once: is it flat?

    python -m bench.soak [--requests 100000] [--parts 4] [--idle 2000] [--minutes 15] [--save]

Chats, completions, messages, stored responses, tools and schemas that are all different, streams read whole, left and
read slowly, bodies that are refused: by real HTTP over loopback, with 64 API keys. The process is the same in all
parts. Memory, descriptors and threads are read every few seconds; after each part the process reports on its objects.
The slope is that of the least squares through the readings of the last half, with its standard error.
"""

import argparse
import asyncio
import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from bench.instant_backend import HANGING_TOKEN, SECRET
from bench.load import ForeignLoad
from bench.report import Report, Row
from bench.soak_traffic import MAX_TOKENS, Traffic

MODEL = "demo/tandem-demo"
NAME = "tandem-demo"
NUM_KEYS = 64
STORED_MIB = 1  # NOTE: so that what is stored fills its bound within a few thousand requests
KNOWN_PROMPTS_MIB = 16  # NOTE: likewise
_READY_S = 120.0
_PER_STEP = 4


@dataclass(frozen=True, slots=True)
class Sample:
    """One reading. `num_requests`: answered until then."""

    num_requests: int
    at_s: float
    rss_bytes: int
    uss_bytes: int
    num_descriptors: int
    num_threads: int


@dataclass(frozen=True, slots=True)
class Observed:
    """A gateway's process that reports on itself."""

    url: str
    popen: "subprocess.Popen[str]"
    process: psutil.Process
    keys: Sequence[str]

    def sample(self, num_requests: int, at_s: float) -> Sample:
        memory = self.process.memory_full_info()
        return Sample(
            num_requests, at_s, memory.rss, memory.uss, self.process.num_fds(), self.process.num_threads()
        )  # fmt: skip

    def report(self) -> dict[str, Any]:
        assert self.popen.stdin is not None
        assert self.popen.stdout is not None
        self.popen.stdin.write("\n")
        self.popen.stdin.flush()
        found: dict[str, Any] = json.loads(self.popen.stdout.readline())
        return found


@contextlib.contextmanager
def observed_gateway(place: Path, flags: Sequence[str] = ()) -> Iterator[Observed]:
    """Gateway and backend, for the time of the block; accounts are in a file below `place`."""
    accounts = place / "accounts.db"
    behaviour = [NAME, str(MAX_TOKENS), str(_PER_STEP), "0", "1"]
    backend = subprocess.Popen(
        [sys.executable, "-m", "bench.instant_backend", *behaviour],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert backend.stdin is not None
    assert backend.stdout is not None
    admin = _admin_key(accounts)
    command = [sys.executable, "-m", "bench.observed_gateway", "--model", MODEL, "--port", "0"]
    command += ["--routers", backend.stdout.readline().strip(), "--accounts", str(accounts)]
    command += ["--max-concurrent-requests", "8192", "--router-timeout-s", "60", "--silent-after-s", "60"]
    command += ["--stored-responses-mib", str(STORED_MIB), "--known-prompts-mib", str(KNOWN_PROMPTS_MIB), *flags]
    log_path = place / "gateway.log"
    with log_path.open("w") as log:
        gateway = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            env=os.environ | {"TANDEM_CLUSTER_SECRET": SECRET.decode()},
        )  # fmt: skip
    try:
        url = _ready(log_path, gateway)
        yield Observed(url, gateway, psutil.Process(gateway.pid), _keys(url, admin))
    finally:
        gateway.terminate()
        gateway.communicate(timeout=60)
        backend.communicate(timeout=60)


def _admin_key(accounts: Path) -> str:
    command = [sys.executable, "-m", "tandem.cli.main", "keys", "create", "--accounts", str(accounts), "--admin"]
    output = subprocess.run([*command, "--name", "soak"], capture_output=True, text=True, check=True).stdout
    return next(word for word in output.split() if word.startswith("sk-tandem-"))


def _keys(url: str, admin: str) -> list[str]:
    with httpx.Client(base_url=url, headers={"authorization": f"Bearer {admin}"}, timeout=60) as client:
        made = [client.post("/admin/keys", json={"name": f"key-{n}", "tenant": f"tenant-{n}"}) for n in range(NUM_KEYS)]
    for answer in made:
        answer.raise_for_status()
    return [str(answer.json()["secret"]) for answer in made]


def _ready(log: Path, gateway: "subprocess.Popen[str]") -> str:
    deadline_s = time.monotonic() + _READY_S
    while time.monotonic() < deadline_s and gateway.poll() is None:
        lines = log.read_text().splitlines()
        url = next((line.split("ready at ")[1].split()[0] for line in lines if "ready at " in line), None)
        if url is not None and httpx.get(f"{url}/ready").status_code == 200:
            return url
        time.sleep(0.1)
    raise RuntimeError(f"the gateway did not become ready: {log.read_text()[-2000:]}")


async def soak(
    observed: Observed, num_requests: int, num_parts: int, concurrency: int, every_s: float, most_s: float
) -> tuple[Traffic, list[Sample], list[dict[str, Any]]]:
    """Send the parts, for `most_s` at most; readings in the order they were taken, a report after each part."""
    traffic = Traffic(observed.url, NAME, observed.keys, seed=1, text=" word" * MAX_TOKENS)
    samples, reports, began_s = list[Sample](), list[dict[str, Any]](), time.monotonic()

    def read() -> Sample:
        return observed.sample(traffic.num_done, time.monotonic() - began_s)

    async def watch() -> None:
        while True:
            samples.append(read())
            await asyncio.sleep(every_s)

    watching = asyncio.create_task(watch())
    try:
        for _ in range(num_parts):
            if time.monotonic() > began_s + most_s:
                break
            await traffic.send(num_requests // num_parts, concurrency, began_s + most_s)
            reports.append(await asyncio.to_thread(observed.report))
            print(json.dumps({"done": traffic.num_done, "rss_mb": read().rss_bytes / 1e6, **reports[-1]["heap"]}))
    finally:
        watching.cancel()
    await traffic.close()
    samples.append(read())
    return traffic, samples, reports


async def hold_idle(observed: Observed, num_streams: int) -> tuple[Sample, Sample, Sample]:
    """Before there are idle streams, while there are, and once all are gone."""
    traffic = Traffic(observed.url, NAME, observed.keys, seed=2, text=None)
    before = observed.sample(0, 0.0)
    held = await traffic.hold_idle(num_streams, [HANGING_TOKEN] * 8)
    during = observed.sample(num_streams, 0.0)
    for writer in held:
        writer.transport.abort()
    deadline_s = time.monotonic() + 60
    while (after := observed.sample(0, 0.0)).num_descriptors > before.num_descriptors + 8:
        if time.monotonic() > deadline_s:
            break
        await asyncio.sleep(0.2)
    return before, during, after


def slope(samples: Sequence[Sample]) -> tuple[float, float]:
    """MB that 10,000 requests add over the last half of the requests, and its standard error."""
    half = samples[-1].num_requests / 2
    kept = [(each.num_requests / 1e4, each.rss_bytes / 1e6) for each in samples if each.num_requests >= half]
    if len(kept) < 3:
        return math.nan, math.nan
    mean_x, mean_y = (sum(column) / len(kept) for column in zip(*kept, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in kept)
    gradient = sum((x - mean_x) * (y - mean_y) for x, y in kept) / spread
    left = sum((y - mean_y - gradient * (x - mean_x)) ** 2 for x, y in kept)
    return gradient, math.sqrt(left / (len(kept) - 2) / spread)


def rows_of(traffic: Traffic, samples: Sequence[Sample], load: ForeignLoad) -> list[Row]:
    label, foreign = f"{traffic.num_done} mixed requests", load.cores()
    gradient, error = slope(samples)
    last = samples[-1]
    tenths = [
        next(each for each in samples if each.num_requests >= last.num_requests * tenth // 10) for tenth in range(11)
    ]
    figures = [
        ("resident, each tenth", last.rss_bytes / 1e6, "MB", tuple(each.rss_bytes / 1e6 for each in tenths)),
        ("of its own, each tenth", last.uss_bytes / 1e6, "MB", tuple(each.uss_bytes / 1e6 for each in tenths)),
        ("slope over the last half, standard error", gradient, "MB/10,000", (gradient, error)),
        ("descriptors, each tenth", last.num_descriptors, "", tuple(float(each.num_descriptors) for each in tenths)),
        ("threads, each tenth", last.num_threads, "", tuple(float(each.num_threads) for each in tenths)),
        ("unexpected answers", traffic.unexpected.total(), "", ()),
        ("requests a second", last.num_requests / last.at_s, "1/s", ()),
    ]
    return [
        Row(label, "gateway", metric, value, unit, samples=each, foreign_cores=foreign)
        for metric, value, unit, each in figures
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--parts", type=int, default=4)
    parser.add_argument("--minutes", type=float, default=30.0, help="at most")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--every-s", type=float, default=3.0, help="between two readings")
    parser.add_argument("--idle", type=int, default=2000, help="idle streams held at the end; 0: none")
    parser.add_argument("--save", action="store_true")
    given = parser.parse_args()
    load = ForeignLoad()
    with tempfile.TemporaryDirectory() as place, observed_gateway(Path(place)) as observed:
        traffic, samples, reports = asyncio.run(
            soak(observed, given.requests, given.parts, given.concurrency, given.every_s, 60 * given.minutes)
        )
        rows = rows_of(traffic, samples, load)
        if given.idle:
            before, during, after = asyncio.run(hold_idle(observed, given.idle))
            again = asyncio.run(hold_idle(observed, given.idle))[-1]
            per_stream = (during.rss_bytes - before.rss_bytes) / given.idle / 1e3
            label = f"{given.idle} idle streams"
            rows.append(Row(label, "gateway", "each", per_stream, "kB"))
            rows.append(Row(label, "gateway", "kept after they left", (after.rss_bytes - before.rss_bytes) / 1e6, "MB"))
            more = (again.rss_bytes - after.rss_bytes) / 1e6
            rows.append(Row(label, "gateway", "kept after as many again came and left, beyond that", more, "MB"))
            left = again.num_descriptors - before.num_descriptors
            rows.append(Row(label, "gateway", "descriptors kept after they left", left, ""))
    notes = [json.dumps(report) for report in reports]
    notes += [f"unexpected {count} times: {what}" for what, count in traffic.unexpected.most_common(20)]
    notes.append(f"evicted {traffic.num_evicted} times: a stored response was to be continued")
    notes.append(json.dumps({"kinds": dict(traffic.counts), "statuses": dict(traffic.statuses)}))
    report = Report("soak", vars(given), rows, notes)
    report.print()
    if given.save:
        print(report.save())


if __name__ == "__main__":
    main()
