"""Cost of the gateway itself: real processes, real HTTP and gRPC, behind it an engine that answers at once.

    python -m bench.gateway [--requests 2000] [--flat 0] [--streams 1,64,512] [--save]

Counted in the gateway's own processor time, so that clients and the stand-in for the engine, which share the machine,
do not count: one core's worth is one second of it. `added latency` is a request alone, from the client's first byte to
its last, less what the same calls to router and worker take without a gateway.
"""

import argparse
import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import orjson
import psutil

from bench.instant_backend import AS_GATEWAY, AS_ROUTER, AS_WORKER, SECRET, HangingWorker, InstantRouter
from bench.load import ForeignLoad, prioritise
from bench.report import Report, Row
from tandem.core.clock import SystemClock
from tandem.core.sampling_params import SamplingParams
from tandem.core.scope import UNSCOPED
from tandem.loadtest.http_client import HttpClient, WholeAnswer
from tandem.rpc.client import RouterClient, WorkerClient
from tandem.rpc.messages import GenerateCall, PairCall
from tandem.rpc.server import serve_router, serve_worker
from tandem.text.tokenizer import Tokenizer

MODEL = "demo/tandem-demo"
NAME = "tandem-demo"
PROMPT_TOKENS = 2000
WHOLE_TOKENS = 16
STREAM_TOKENS = 256
PACE_S = 0.02  # an engine's step: every token comes alone, and has a write of its own to its client
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class System:
    """A gateway process before an instant backend."""

    url: str
    router: str
    process: psutil.Process

    def cpu_s(self) -> float:
        times = self.process.cpu_times()
        return float(times.user + times.system)

    def memory_bytes(self) -> int:
        return int(self.process.memory_info().rss)


@contextlib.contextmanager
def running(
    num_tokens: int, per_step: int, step_s: float = 0.0, *, is_shared: bool = True, options: Sequence[str] = ()
) -> Iterator[System]:
    """Both processes, for the time of the block; as `bench.instant_backend`. `options`: more of the gateway."""
    behaviour = map(str, (NAME, num_tokens, per_step, step_s, int(is_shared)))
    arguments = [sys.executable, "-m", "bench.instant_backend", *behaviour]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as backend:
        assert backend.stdout is not None
        assert backend.stdin is not None
        with gateway_before(backend.stdout.readline().strip(), options) as system:
            yield system
        backend.stdin.close()


@contextlib.contextmanager
def gateway_before(router: str, options: Sequence[str] = ()) -> Iterator[System]:
    """A gateway process, for the time of the block."""
    command = [sys.executable, "-m", "services.gateway", "--model", MODEL, "--routers", router, "--port", "0"]
    # NOTE: the stand-in is one process for router and worker, and slower than the gateway when all come at once.
    command += ["--max-concurrent-requests", "8192", "--router-timeout-s", "60", "--silent-after-s", "60", *options]
    environment = os.environ | {"TANDEM_CLUSTER_SECRET": SECRET.decode()}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as gateway:
        try:
            yield System(_ready(gateway), router, psutil.Process(gateway.pid))
        finally:
            gateway.terminate()


def _ready(gateway: "subprocess.Popen[str]") -> str:
    """Its address, once it serves."""
    assert gateway.stderr is not None
    for line in gateway.stderr:
        if "ready at" in line:
            url = line.split("ready at ")[1].split()[0]
            deadline_s = time.monotonic() + 20
            while time.monotonic() < deadline_s:
                if httpx.get(f"{url}/ready").status_code == 200:
                    return url
            break
    raise RuntimeError("the gateway did not become ready")


def bodies() -> tuple[bytes, bytes, bytes]:
    """A chat, the same as a stream, and a completion of token ids, each of about `PROMPT_TOKENS` tokens."""
    tokenizer = Tokenizer.load(Path(MODEL))
    text = "The quick brown fox jumps over the lazy dog near the river bank. "
    per_text = len(tokenizer.encode(text, add_special_tokens=False))
    content = text * (PROMPT_TOKENS // per_text)
    chat = {"model": NAME, "messages": [{"role": "user", "content": content}], "max_tokens": WHOLE_TOKENS}
    ids = {"model": NAME, "prompt": [100] * PROMPT_TOKENS, "max_tokens": WHOLE_TOKENS}
    stream = chat | {"stream": True, "stream_options": {"include_usage": True}}
    return orjson.dumps(chat), orjson.dumps(stream), orjson.dumps(ids)


async def ask(client: HttpClient, path: str, body: bytes) -> bytes:
    answer = WholeAnswer()
    await client.exchange("POST", path, body, answer, TIMEOUT_S)
    assert answer.status == 200, answer.content[:500]
    return answer.content


async def ask_many(system: System, path: str, body: bytes, num_requests: int, concurrency: int) -> float:
    """Processor seconds that the gateway took for all."""
    client = HttpClient(system.url, {}, SystemClock())
    left = iter(range(num_requests))

    async def work() -> None:
        for _ in left:
            await ask(client, path, body)

    try:
        before_s = system.cpu_s()
        await asyncio.gather(*(work() for _ in range(concurrency)))
        return system.cpu_s() - before_s
    finally:
        await client.close()


async def one_by_one(system: System, body: bytes, token_ids: Sequence[int], num_requests: int) -> tuple[float, float]:
    """Median seconds of a request alone, and of the gRPC calls behind it made directly."""
    client = HttpClient(system.url, {}, SystemClock())
    router = RouterClient(system.router, AS_GATEWAY)
    through, direct = [], []
    pair = PairCall(
        request_id="bench", model=NAME, token_ids=tuple(token_ids), num_expected_output=WHOLE_TOKENS, scope=UNSCOPED
    )
    answer = await router.pair(pair)
    worker = WorkerClient(answer.decode.address, AS_GATEWAY)
    params = SamplingParams(max_tokens=WHOLE_TOKENS, seed=1)
    call = GenerateCall(request_id="bench", prompt_token_ids=tuple(token_ids), params=params, scope=UNSCOPED)
    try:
        for _ in range(num_requests):
            started_s = time.perf_counter()
            await ask(client, "/v1/chat/completions", body)
            middle_s = time.perf_counter()
            await router.pair(pair)
            async for _ in worker.generate(call, timeout_s=None):
                pass
            through.append(middle_s - started_s)
            direct.append(time.perf_counter() - middle_s)
    finally:
        await client.close()
        await router.close()
        await worker.close()
    return statistics.median(through), statistics.median(direct)


def measure_whole(num_requests: int, rounds: int) -> list[Row]:
    """Requests a second of one core, and what a request alone is held up."""
    chat, _, ids = bodies()
    rows = []
    with running(WHOLE_TOKENS, WHOLE_TOKENS) as system:
        for name, path, body in (("chat", "/v1/chat/completions", chat), ("token ids", "/v1/completions", ids)):
            asyncio.run(ask_many(system, path, body, num_requests // 10 + 1, 16))
            load = ForeignLoad()
            samples = [
                num_requests / asyncio.run(ask_many(system, path, body, num_requests, 16)) for _ in range(rounds)
            ]
            rows.append(_row(f"{name}, {PROMPT_TOKENS} prompt tokens", "rate", samples, "requests/s/core", load))
        load = ForeignLoad()
        pairs = [asyncio.run(one_by_one(system, chat, [100] * PROMPT_TOKENS, 100)) for _ in range(rounds)]
        samples = [1000 * (through - direct) for through, direct in pairs]
        rows.append(_row(f"chat, {PROMPT_TOKENS} prompt tokens", "added latency p50", samples, "ms", load))
    return rows


def measure_streams(
    concurrencies: Sequence[int], rounds: int, per_step: int, step_s: float = 0.0, *, is_shared: bool = True
) -> list[Row]:
    """Tokens a second of one core; arguments as `bench.instant_backend` takes them."""
    _, stream, _ = bodies()
    short = orjson.dumps({**orjson.loads(stream), "messages": [{"role": "user", "content": "hi"}]})
    rows = []
    with running(STREAM_TOKENS, per_step, step_s, is_shared=is_shared) as system:
        asyncio.run(ask_many(system, "/v1/chat/completions", short, 8, 8))
        for concurrency in concurrencies:
            load = ForeignLoad()
            num_requests = max(64, concurrency) if concurrency > 1 else 16
            samples = [
                num_requests * STREAM_TOKENS
                / asyncio.run(ask_many(system, "/v1/chat/completions", short, num_requests, concurrency))
                for _ in range(rounds)
            ]  # fmt: skip
            rows.append(_row(_named(concurrency, per_step, step_s, is_shared), "rate", samples, "tokens/s/core", load))
    return rows


def _named(concurrency: int, per_step: int, step_s: float, is_shared: bool) -> str:
    pace = f", a step each {1000 * step_s:g} ms" if step_s else ""
    return f"{concurrency} streams, {per_step} tokens a step{pace}{'' if is_shared else ', calls of their own'}"


async def _hang_up(num_times: int) -> list[float]:
    """Seconds from a client's hanging up to its worker's being told."""
    worker = HangingWorker(NAME)
    serving = await serve_worker(worker, "127.0.0.1:0", AS_WORKER)
    router = await serve_router(InstantRouter(NAME, serving.address), "127.0.0.1:0", AS_ROUTER)
    body, found = bodies()[1], []
    gateway = gateway_before(router.address)
    system = await asyncio.to_thread(gateway.__enter__)  # NOTE: it asks the router, which this loop serves
    try:
        async with httpx.AsyncClient(base_url=system.url, timeout=TIMEOUT_S) as client:
            for number in range(num_times):
                async with client.stream("POST", "/v1/chat/completions", content=body) as answer:
                    await anext(answer.aiter_bytes())
                    left_s = time.monotonic()
                while len(worker.gone_s) <= number:
                    await asyncio.sleep(0.001)
                found.append(worker.gone_s[number] - left_s)
    finally:
        await asyncio.to_thread(gateway.__exit__, None, None, None)
        await router.stop(0)
        await serving.stop(0)
    return found


def measure_hang_ups(num_times: int = 100) -> list[Row]:
    load = ForeignLoad()
    found = sorted(1000 * seconds for seconds in asyncio.run(_hang_up(num_times)))
    p99 = found[int(0.99 * len(found))]
    return [
        _row("client hangs up", "worker told, p50", [statistics.median(found)], "ms", load),
        _row("client hangs up", "worker told, p99", [p99], "ms", load),
    ]


def measure_memory(num_requests: int) -> list[Row]:
    """Growth of the gateway's memory from the first tenth of the requests to the last."""
    ids = bodies()[2]
    with running(WHOLE_TOKENS, WHOLE_TOKENS) as system:
        load, sizes = ForeignLoad(), []
        for _ in range(10):
            asyncio.run(ask_many(system, "/v1/completions", ids, num_requests // 10, 16))
            sizes.append(system.memory_bytes() / 2**20)
    return [_row(f"{num_requests} requests", "growth after a tenth", [sizes[-1] - sizes[0]], "MiB", load)]


def _row(workload: str, metric: str, samples: Sequence[float], unit: str, load: ForeignLoad) -> Row:
    return Row(
        workload=workload,
        system="gateway",
        metric=metric,
        value=statistics.median(samples),
        unit=unit,
        samples=tuple(samples),
        foreign_cores=load.cores(),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--flat", type=int, default=0, help="requests over which memory is watched; 0: not")
    parser.add_argument("--streams", default="1,64,512", help="concurrent streams, a list")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", action="store_true")
    given = parser.parse_args()
    prioritise()
    streams = [int(number) for number in given.streams.split(",") if number]
    rows = measure_whole(given.requests, given.rounds) + measure_hang_ups()
    middle = streams[len(streams) // 2]
    for is_shared in (False, True):
        rows += measure_streams([middle], given.rounds, 1, PACE_S, is_shared=is_shared)
    rows += measure_streams([middle], given.rounds, 1, is_shared=False)
    for per_step in (1, 4, 16):
        rows += measure_streams(streams if per_step == 1 else streams[-1:], given.rounds, per_step)
    if given.flat:
        rows += measure_memory(given.flat)
    report = Report("gateway", vars(given), rows)
    report.print()
    if given.save:
        report.save()


if __name__ == "__main__":
    main()
