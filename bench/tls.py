"""The cost of TLS between processes: time and processor time of a request, of a call, and of bytes over the tcp
transport.

    python -m bench.tls [--rounds 300] [--calls 1] [--mib 32] [--bursts 30] [--save]

With and without TLS in turn in one run, over loopback, in bursts that are short so that other work interrupts few.
With one call a burst, percentiles are those of calls.
Client and server of a call are in one process, so its processor time is that of both ends; blocks are read from a
process of their own. A request is a chat's to the gateway of a whole system, whose prompt is handed over by tcp; its
processor time is that of all processes of the system.
"""

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import psutil

from bench.call_proofs import PROMPTS, ImmediateRouter
from bench.disaggregation import SPLIT, Client, running
from bench.instant_backend import AS_GATEWAY, AS_ROUTER
from bench.report import Report, Row
from tandem.core.scope import UNSCOPED
from tandem.rpc.client import RouterClient
from tandem.rpc.credentials import Credentials, certified_role
from tandem.rpc.messages import PairCall, PairingAnswer
from tandem.rpc.server import serve_router
from tandem.tls.authority import Authority
from tandem.tls.files import TlsFiles
from tandem.tls.identity import CertifiedRole
from tandem.transport.base import MemoryPool, Peer
from tandem.transport.card import Identity
from tandem.transport.tcp.transport import TcpConfig, TcpTransport

MODEL = "demo/tandem-demo"
PAGE_BYTES = 1 << 20
KINDS = ("plain", "TLS")
CALL = "time of a call", "processor time of a call, both ends"
REQUEST = "time of a request", "processor time of a request, all processes"
PROMPT_TOKENS, ANSWER_TOKENS = 512, 32
BURST_REQUESTS = 20  # since the system counts processor time in steps of 10 ms
_COMPATIBILITY = {"model": "bench"}
_SECRET = b"of a benchmark, on loopback only"

Ask = Callable[[PairCall], Awaitable[PairingAnswer]]


@asynccontextmanager
async def asked(directory: Path | None) -> AsyncIterator[tuple[Ask, Callable[[], RouterClient]]]:
    """A router that answers at once: over one connection, and by clients that have none yet."""
    server = await serve_router(ImmediateRouter(), "127.0.0.1:0", certified(AS_ROUTER, directory))
    own = certified(AS_GATEWAY, directory)
    client = RouterClient(server.address, own)
    try:
        yield client.pair, lambda: RouterClient(server.address, own)
    finally:
        await client.close()
        await server.stop()


def certified(credentials: Credentials, directory: Path | None) -> Credentials:
    role = certified_role(credentials.role)
    return credentials if directory is None else replace(credentials, tls=TlsFiles(directory / role, role))


async def measure_calls(directory: Path, num_rounds: int, num_calls: int) -> list[Row]:
    """Milliseconds from end to end, and of processor time at both ends, of a call and of a first call."""
    rows: list[Row] = []
    async with AsyncExitStack() as opened:
        kinds = dict(
            zip(KINDS, [await opened.enter_async_context(asked(each)) for each in (None, directory)], strict=True)
        )
        for num_tokens in PROMPTS:
            token_ids = array("I", range(num_tokens))
            call = PairCall(request_id="r", model="m", token_ids=token_ids, scope=UNSCOPED, num_expected_output=1)
            found: dict[str, list[tuple[float, float]]] = {name: [] for name in KINDS}
            for number in range(num_rounds + 1):
                for name in sorted(KINDS, reverse=bool(number % 2)):
                    sample = await _timed(kinds[name][0], call, num_calls)
                    if number:  # NOTE: the first connects
                        found[name].append(sample)
            rows += _compared(f"Pair of {num_tokens} tokens", found, CALL)
        first: dict[str, list[tuple[float, float]]] = {name: [] for name in KINDS}
        for number in range(num_rounds):
            for name in sorted(KINDS, reverse=bool(number % 2)):
                client = kinds[name][1]()
                first[name].append(await _timed(client.pair, call, 1))
                await client.close()
        rows += _compared(f"first Pair of {num_tokens} tokens on a connection", first, CALL)
    return rows


async def _timed(ask: Ask, call: PairCall, num_calls: int) -> tuple[float, float]:
    """Milliseconds of a call, and of processor time."""
    started_s, cpu_s = time.perf_counter(), time.process_time()
    for _ in range(num_calls):
        await ask(call)
    elapsed = time.perf_counter() - started_s, time.process_time() - cpu_s
    return elapsed[0] / num_calls * 1e3, elapsed[1] / num_calls * 1e3


def _compared(workload: str, found: dict[str, list[tuple[float, float]]], metrics: tuple[str, str]) -> list[Row]:
    """`found`: milliseconds, and of processor time. `metrics`: names of both."""
    rows = []
    for index, metric in enumerate(metrics):
        for name in KINDS:
            rows.append(_row(workload, name, metric, [each[index] for each in found[name]], "ms"))
        pairs = zip(found["TLS"], found["plain"], strict=True)
        rows.append(_row(workload, "TLS", f"added {metric}", [tls[index] - plain[index] for tls, plain in pairs], "ms"))
    cpu_ms = {name: statistics.median(each[1] for each in found[name]) for name in KINDS}
    share = (cpu_ms["TLS"] - cpu_ms["plain"]) * 100 / 1e3 * 100
    rows.append(Row(workload, "TLS", "added share of a core at 100 a second", share, "%"))
    return [*rows, *_tails(workload, {name: [each[0] for each in found[name]] for name in KINDS}, metrics[0])]


def _tails(workload: str, times_ms: dict[str, list[float]], metric: str) -> list[Row]:
    """99th percentiles, and what TLS adds to it."""
    tail_ms = {name: float(np.percentile(times_ms[name], 99)) for name in KINDS}
    rows = [Row(workload, name, f"{metric}, p99", tail_ms[name], "ms") for name in KINDS]
    return [*rows, Row(workload, "TLS", f"added {metric}, p99", tail_ms["TLS"] - tail_ms["plain"], "ms")]


async def measure_requests(num_bursts: int) -> list[Row]:
    """Milliseconds of a request to a whole system, one after another in bursts, and of processor time."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in KINDS}
    flags = ("--transport", "tcp", "--max-local-tokens", "0")
    async with AsyncExitStack() as opened:
        clients, processes = {}, {}
        for name in KINDS:
            known = set(psutil.Process().children())
            url = opened.enter_context(running(SPLIT, MODEL, (*flags, *(("--tls",) if name == "TLS" else ()))))
            (up,) = set(psutil.Process().children()) - known
            processes[name] = [up, *up.children(recursive=True)]
            clients[name] = Client(url, 200, seed=1)
            opened.push_async_callback(clients[name].close)
        for number in range(num_bursts + 1):
            for name in sorted(KINDS, reverse=bool(number % 2)):
                started_s, cpu_s = time.perf_counter(), _cpu_s(processes[name])
                for _ in range(BURST_REQUESTS):
                    await clients[name].complete(PROMPT_TOKENS, ANSWER_TOKENS)
                elapsed_s = time.perf_counter() - started_s, _cpu_s(processes[name]) - cpu_s
                if number:  # NOTE: the first connects
                    found[name].append((elapsed_s[0] / BURST_REQUESTS * 1e3, elapsed_s[1] / BURST_REQUESTS * 1e3))
    return _compared(f"request of {PROMPT_TOKENS} tokens, {ANSWER_TOKENS} answered", found, REQUEST)


def _cpu_s(processes: list[psutil.Process]) -> float:
    return sum(times.user + times.system for times in (process.cpu_times() for process in processes))


def _pool(num_blocks: int) -> MemoryPool:
    pages = np.ones((num_blocks, PAGE_BYTES), dtype=np.uint8)
    return MemoryPool(pages.ctypes.data, PAGE_BYTES, num_blocks, "cpu", pages)


def _transport(num_blocks: int, directory: Path | None) -> TcpTransport:
    tls = None if directory is None else TlsFiles(directory / CertifiedRole.WORKER, CertifiedRole.WORKER)
    return TcpTransport(_pool(num_blocks), Identity(_COMPATIBILITY, _SECRET), TcpConfig(tls=tls))


def _serve(answers: Connection, num_blocks: int, directory: Path | None) -> None:
    """A source in a process of its own, until told to end. Answers each message by the processor time it has taken."""
    transport = _transport(num_blocks, directory)
    answers.send(transport.card())
    while answers.recv():
        answers.send(time.process_time())
    transport.close()


@contextmanager
def source(num_blocks: int, directory: Path | None) -> Iterator[tuple[bytes, Callable[[], float]]]:
    """Its card, and a question for its processor time."""
    ours, theirs = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=_serve, args=(theirs, num_blocks, directory))
    process.start()

    def cpu_s() -> float:
        ours.send(True)
        return float(ours.recv())

    try:
        yield ours.recv(), cpu_s
    finally:
        ours.send(False)
        process.join()


def measure_blocks(directory: Path, num_rounds: int, num_mib: int) -> list[Row]:
    """Gigabytes per second of one reader and one source, and the processor time that each takes for one."""
    num_blocks = num_mib + 1
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in KINDS}
    with ExitStack() as opened:
        sides = {}
        for name, place in zip(KINDS, (None, directory), strict=True):
            card, cpu_s = opened.enter_context(source(num_blocks, place))
            reader = _transport(num_blocks, place)
            opened.callback(reader.close)
            sides[name] = reader, reader.connect(card), cpu_s
        for number in range(num_rounds + 1):
            for name in sorted(KINDS, reverse=bool(number % 2)):
                sample = _read(*sides[name], list(range(1, num_blocks)))
                if number:
                    found[name].append(sample)
    workload = f"reads of {num_mib} MiB over tcp"
    metrics = (("rate", "GB/s"), ("processor time, reader", "s/GB"), ("processor time, source", "s/GB"))
    times_ms = {name: [num_mib * 1.048576 / each[0] for each in found[name]] for name in KINDS}
    both_ends = {name: statistics.median(reader + source for _, reader, source in found[name]) for name in KINDS}
    added_ms = statistics.median(times_ms["TLS"]) - statistics.median(times_ms["plain"])
    return [
        *(
            _row(workload, name, metric, [each[index] for each in found[name]], unit)
            for index, (metric, unit) in enumerate(metrics)
            for name in KINDS
        ),
        *(_row(workload, name, "time of a read", times_ms[name], "ms") for name in KINDS),
        Row(workload, "TLS", "added time of a read", added_ms, "ms"),
        *_tails(workload, times_ms, "time of a read"),
        Row(workload, "TLS", "added share of a core at 0.1 GB/s", (both_ends["TLS"] - both_ends["plain"]) * 10, "%"),
    ]


def _read(
    reader: TcpTransport, peer: Peer, source_cpu_s: Callable[[], float], blocks: list[int]
) -> tuple[float, float, float]:
    before = time.perf_counter(), time.process_time(), source_cpu_s()
    transfer = reader.read(peer, blocks, blocks, 120.0)
    transfer.wait(120.0)
    if transfer.error is not None:
        raise transfer.error
    elapsed_s, num_gb = time.perf_counter() - before[0], len(blocks) * PAGE_BYTES / 1e9
    return num_gb / elapsed_s, (time.process_time() - before[1]) / num_gb, (source_cpu_s() - before[2]) / num_gb


def _row(workload: str, system: str, metric: str, samples: list[float], unit: str) -> Row:
    return Row(workload, system, metric, statistics.median(samples), unit, samples=tuple(samples))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--calls", type=int, default=1)
    parser.add_argument("--mib", type=int, default=32)
    parser.add_argument("--bursts", type=int, default=30)
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        directory, authority = Path(scratch), Authority("bench")
        for role in CertifiedRole:
            authority.write(directory / role, role)
        rows = asyncio.run(measure_calls(directory, arguments.rounds, arguments.calls))
        rows += measure_blocks(directory, arguments.rounds, arguments.mib)
    rows += asyncio.run(measure_requests(arguments.bursts))
    load = os.getloadavg()
    settings = {
        "load of the machine": [round(each, 1) for each in load],
        "rounds": arguments.rounds,
        "calls": arguments.calls,
        "mib": arguments.mib,
        "bursts of requests": arguments.bursts,
    }
    report = Report("tls", settings, rows)
    report.print()
    if arguments.save:
        print(report.save())


if __name__ == "__main__":
    main()
