"""Cost and traffic of disaggregation: real processes behind the real gateway, loaded over HTTP.

    python -m bench.disaggregation [--shape small] [--lengths 512,2048,8192,32768] [--rounds 3] [--save]

How much of the time to the first token is spent on moving KV, and how much of that is exposed, at several prompt
lengths; and how the throughput of one prefill and one decode worker compares with one aggregated worker on the same
cores. Systems take turns, so that what disturbs the machine disturbs both.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from bench.checkpoints import SHAPES, random_checkpoint
from bench.load import ForeignLoad, prioritise
from bench.report import Report, Row

START_S = 180.0
REQUEST_S = 600.0


@dataclass(frozen=True, slots=True)
class System:
    """A cluster on this machine."""

    name: str
    num_prefill: int
    flags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of one size, so many at once."""

    name: str
    num_requests: int
    concurrency: int
    num_prompt_tokens: int
    num_output_tokens: int


AGGREGATED = System("aggregated, 2 threads", 0, ("--num-threads", "2", "--cpus", "any"))
SPLIT = System("1P1D, 1 thread each", 1, ("--num-threads", "1", "--cpus", "any"))
SHARED = System("1P1D, 2 threads each", 1, ("--num-threads", "2", "--cpus", "any"))
LOADS = (
    Load("32 x 256 in / 64 out, 16 at once", 32, 16, 256, 64),
    Load("16 x 1024 in / 64 out, 8 at once", 16, 8, 1024, 64),
)


@contextmanager
def running(system: System, model: str, extra: Sequence[str] = (), **env: str) -> Iterator[str]:
    """The system's address, for the time of the block. `env`: variables for its processes."""
    port = random.randint(20000, 29999)
    command = [sys.executable, "-m", "tandem.cli.main", "up", "--model", model, "--served-model-name", "m", "--quiet"]
    command += ["--prefill", str(system.num_prefill), "--decode", "1", "--port", str(port), *system.flags, *extra]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, **env})
    url = f"http://127.0.0.1:{port}"
    try:
        _await_ready(url, system, process)
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def _await_ready(url: str, system: System, process: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s:
        assert process.poll() is None, f"{system.name} ended with code {process.returncode}"
        try:
            state = httpx.get(f"{url}/ready", timeout=2).json()
        except (httpx.HTTPError, json.JSONDecodeError):
            state = {}
        if state.get("num_decode") == 1 and state.get("num_prefill") == system.num_prefill:
            return
        time.sleep(0.2)
    raise TimeoutError(f"{system.name} is not ready after {START_S} s")


class Client:
    """Sends prompts of random tokens, none of which the caches have seen."""

    def __init__(self, url: str, vocab_size: int, seed: int) -> None:
        self._http = httpx.AsyncClient(base_url=url, timeout=REQUEST_S)
        self._vocab_size = vocab_size
        self._random = random.Random(seed)

    async def complete(self, num_prompt_tokens: int, num_output_tokens: int) -> str:
        """One request to its end; returns its id."""
        return await self.complete_prompt(self.random_tokens(num_prompt_tokens), num_output_tokens)

    def random_tokens(self, count: int) -> list[int]:
        return [self._random.randrange(1, self._vocab_size) for _ in range(count)]

    async def complete_prompt(self, prompt: Sequence[int], num_output_tokens: int) -> str:
        """The same for a given prompt."""
        body = {
            "model": "m",
            "prompt": list(prompt),
            "max_tokens": num_output_tokens,
            "ignore_eos": True,
            "temperature": 0,
        }
        answer = await self._http.post("/v1/completions", json=body)
        answer.raise_for_status()
        assert answer.json()["usage"]["completion_tokens"] == num_output_tokens, answer.text
        return str(answer.headers["x-request-id"])

    async def timeline(self, request_id: str) -> list[dict[str, Any]]:
        """Stages of its timeline."""
        answer = await self._http.get(f"/admin/requests/{request_id}")
        answer.raise_for_status()
        stages: list[dict[str, Any]] = answer.json()["stages"]
        return stages

    async def run(self, load: Load) -> float:
        """Output tokens a second."""
        slots = asyncio.Semaphore(load.concurrency)

        async def one() -> None:
            async with slots:
                await self.complete(load.num_prompt_tokens, load.num_output_tokens)

        began_s = time.perf_counter()
        await asyncio.gather(*(one() for _ in range(load.num_requests)))
        return load.num_requests * load.num_output_tokens / (time.perf_counter() - began_s)

    async def close(self) -> None:
        await self._http.aclose()


@dataclass(frozen=True, slots=True)
class Moved:
    """One request's transfer. `exposed_s`: from the first token until the last byte was in place and confirmed."""

    ttft_s: float
    num_bytes: float
    transfer_s: float
    exposed_s: float


def moved(stages: Sequence[dict[str, Any]]) -> Moved:
    """Figures read from its timeline."""
    transfers = [stage for stage in stages if stage["name"] == "transfer"]
    firsts = [stage["start_s"] for stage in stages if stage["name"] == "first token"]
    last_s = max(stage["start_s"] + stage["duration_s"] for stage in transfers)
    return Moved(
        ttft_s=max(firsts) - min(stage["start_s"] for stage in stages),
        num_bytes=sum(stage["attributes"]["num_bytes"] for stage in transfers),
        transfer_s=sum(stage["duration_s"] for stage in transfers),
        exposed_s=max(0.0, last_s - min(firsts)),
    )


async def transfer_rows(url: str, vocab_size: int, lengths: Sequence[int], rounds: int) -> list[Row]:
    """Transfer and time to first token, one request at a time."""
    client = Client(url, vocab_size, seed=1)
    rows: list[Row] = []
    try:
        await client.complete(min(1024, *lengths), 2)
        for length in lengths:
            foreign = ForeignLoad()
            samples = [moved(await client.timeline(await client.complete(length, 2))) for _ in range(rounds)]
            rows += _moved_rows(f"{length} prompt tokens", samples, foreign.cores())
    finally:
        await client.close()
    return rows


def _moved_rows(workload: str, samples: Sequence[Moved], foreign_cores: float) -> Iterator[Row]:
    figures = {
        ("time to first token", "s"): [sample.ttft_s for sample in samples],
        ("moved", "MB"): [sample.num_bytes / 1e6 for sample in samples],
        ("transfer rate", "GB/s"): [sample.num_bytes / sample.transfer_s / 1e9 for sample in samples],
        ("transfer, share of time to first token", "%"): [100 * s.transfer_s / s.ttft_s for s in samples],
        ("exposed transfer", "ms"): [1000 * sample.exposed_s for sample in samples],
        ("exposed transfer, share of time to first token", "%"): [100 * s.exposed_s / s.ttft_s for s in samples],
    }
    for (metric, unit), values in figures.items():
        yield Row(
            workload,
            SPLIT.name,
            metric,
            statistics.median(values),
            unit,
            samples=tuple(values),
            foreign_cores=foreign_cores,
        )


async def _rate(url: str, vocab_size: int, load: Load, seed: int) -> float:
    client = Client(url, vocab_size, seed)
    try:
        await client.complete(64, 4)
        return await client.run(load)
    finally:
        await client.close()


def throughput_rows(model: str, vocab_size: int, systems: Sequence[System], rounds: int) -> list[Row]:
    """Output tokens a second of each system, in turns; one cluster runs at a time."""
    rates: dict[tuple[str, str], list[float]] = {}
    for turn in range(rounds):
        for system in systems:
            with running(system, model) as url:
                for load in LOADS:
                    rate = asyncio.run(_rate(url, vocab_size, load, seed=turn))
                    rates.setdefault((load.name, system.name), []).append(rate)
    return [_rate_row(load.name, system, rates) for load in LOADS for system in systems]


def _rate_row(workload: str, system: System, rates: dict[tuple[str, str], list[float]]) -> Row:
    """Against the first system of the same workload."""
    samples = rates[workload, system.name]
    baseline = statistics.median(rates[workload, AGGREGATED.name])
    value = statistics.median(samples)
    return Row(workload, system.name, "output", value, "tok/s", baseline, value / baseline, tuple(samples))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="small", choices=sorted(SHAPES))
    parser.add_argument("--lengths", default="512,2048,8192,32768", help="prompt tokens; empty: no transfers")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--throughput-rounds", type=int, default=3, help="0: no throughput")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    prioritise()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    model, vocab_size = str(random_checkpoint(options.shape)), SHAPES[options.shape]["vocab_size"]
    lengths = [int(length) for length in options.lengths.split(",") if length]
    rows: list[Row] = []
    if lengths:
        longest = str(max(lengths) + 64)
        with running(
            SPLIT, model, ("--max-model-len", longest), TANDEM_MAX_LOCAL_TOKENS="0", TANDEM_MAX_TTFT_S="600"
        ) as url:
            rows += asyncio.run(transfer_rows(url, vocab_size, lengths, options.rounds))
    if options.throughput_rounds:
        rows += throughput_rows(model, vocab_size, (AGGREGATED, SPLIT, SHARED), options.throughput_rounds)
    report = Report("disaggregation", vars(options), rows)
    report.print()
    if options.save:
        print(report.save())


if __name__ == "__main__":
    main()
