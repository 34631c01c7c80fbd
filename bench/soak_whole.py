"""A whole cluster under one fault after another: are tokens exact, and memory, descriptors, threads and keys flat?

    python -m bench.soak_whole [--minutes 5] [--fault-every-s 60] [--save]

`tandem up` serves the demo model with two routers, two prefill and two decode workers, and a Redis of its own. First
every prompt is answered while nothing else runs. Then whole answers, streams and long streams of the same prompts are
compared with that, some are left, and every minute brings the next of `FAULTS`: a process is killed (SIGKILL), which
`tandem up` starts again, or stopped for 2.5 s (SIGSTOP).
"""

import argparse
import asyncio
import contextlib
import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import psutil

from bench.load import ForeignLoad
from bench.report import Report, Row
from tandem.process.ports import free_ports
from tests.helpers.redis_server import RedisServer, running_redis

MODEL = "demo/tandem-demo"
NAME = "tandem-demo"
MAX_TOKENS, MAX_LONG_TOKENS = 48, 500
FAULTS = (
    ("decode", "killed"),
    ("prefill", "killed"),
    ("router", "killed"),
    ("decode", "stopped"),
    ("redis", "killed"),
    ("prefill", "stopped"),
    ("router", "stopped"),
    ("redis", "stopped"),
    ("gateway", "stopped"),
)
STOPPED_S = 2.5
_NUM_PROMPTS = 16
_READY_S = 300.0
_ROLES = ("gateway", "router", "prefill", "decode")
_WORDS = (
    "def", "class", "return", "value", "list", "number", "string", "first", "second",
    "add", "sort", "tree", "node", "key", "while", "for", "in", "range",
)  # fmt: skip


class Whole:
    """A running cluster and its Redis."""

    def __init__(self, url: str, supervisor: psutil.Process, redis: RedisServer) -> None:
        self.url = url
        self.redis = redis
        self._supervisor = supervisor

    def processes(self, role: str) -> list[psutil.Process]:
        """Of one role, those that live."""
        found = list[psutil.Process]()
        for process in self._supervisor.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if f"services.{role}" in process.cmdline():
                    found.append(process)
        return found

    def sizes(self) -> dict[str, tuple[float, int, int]]:
        """Of each role: the largest process's MB of its own, descriptors and threads."""
        found = dict[str, tuple[float, int, int]]()
        for role in _ROLES:
            each = list[tuple[float, int, int]]()
            for process in self.processes(role):
                with contextlib.suppress(psutil.Error, FileNotFoundError):
                    uss = process.memory_full_info().uss / 1e6
                    each.append((uss, process.num_fds(), process.num_threads()))
            found[role] = max(each, default=(0.0, 0, 0))
        return found

    def num_keys(self) -> int:
        """Of Redis."""
        with contextlib.closing(self.redis.client()) as client:
            return int(client.dbsize())

    def inflict(self, role: str, fault: str, number: int) -> None:
        """A fault, of the process with this number of those of the role."""
        if role == "redis":
            if fault == "killed":
                self.redis.kill()
                self.redis.start()
            else:
                with self.redis.paused():
                    time.sleep(STOPPED_S)
            return
        processes = self.processes(role)
        process = processes[number % len(processes)]
        if fault == "killed":
            process.kill()
            return
        process.suspend()
        time.sleep(STOPPED_S)
        process.resume()


@contextlib.contextmanager
def running_whole(place: Path) -> Iterator[Whole]:
    """`tandem up`, for the time of the block."""
    (port,) = free_ports(1, "127.0.0.1", random.Random())
    command = [sys.executable, "-m", "tandem.cli.main", "up", "--model", MODEL, "--port", str(port), "--decode", "2"]
    command += ["--prefill", "2", "--routers", "2", "--dtype", "float32", "--kv-cache-gib", "0.25"]
    own = {**os.environ, "TANDEM_CLUSTER_SECRET": secrets.token_hex(32)}
    with (
        running_redis() as redis,
        (place / "up.log").open("w") as log,
        subprocess.Popen(
            [*command, "--redis", redis.url, "--log-dir", str(place)], env=own, stdout=log, stderr=log
        ) as up,
    ):
        try:
            url, deadline_s = f"http://127.0.0.1:{port}", time.monotonic() + _READY_S
            while not _is_ready(url):
                if up.poll() is not None or time.monotonic() > deadline_s:
                    raise RuntimeError(f"`tandem up` did not become ready: {(place / 'up.log').read_text()[-2000:]}")
                time.sleep(0.5)
            yield Whole(url, psutil.Process(up.pid), redis)
        finally:
            up.send_signal(signal.SIGINT)
            up.wait(90)


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


class Prompts:
    """Greedy requests whose answers are known after `learn`."""

    def __init__(self, whole: Whole, seed: int) -> None:
        self._random = random.Random(seed)
        self._client = httpx.AsyncClient(base_url=whole.url, timeout=180)
        self._prompts = [" ".join(self._random.choices(_WORDS, k=8 + 20 * number)) for number in range(_NUM_PROMPTS)]
        self._texts: list[str] = []
        self._long_texts: list[str] = []
        self.counts: Counter[str] = Counter()
        self.problems: Counter[str] = Counter()
        self.latest_fault = "no fault"

    async def learn(self) -> None:
        """One after the other."""
        for prompt in self._prompts:
            self._texts.append(await self._whole(prompt))
            self._long_texts.append(await self._long(prompt))

    async def ask(self, until_s: float) -> None:
        """One client's requests, in turn."""
        while time.monotonic() < until_s:
            place = self._random.randrange(len(self._prompts))
            kind, prompt = self._random.choice(("whole", "stream", "long stream", "left")), self._prompts[place]
            wanted = (self._long_texts if kind == "long stream" else self._texts)[place]
            try:
                match kind:
                    case "whole":
                        text = await self._whole(prompt)
                    case "long stream":
                        text = await self._long(prompt)
                    case _:
                        text = await self._stream(prompt, 5 if kind == "left" else None)
                is_exact = wanted.startswith(text) if kind == "left" else text == wanted
                self.counts[kind if is_exact else f"{kind}, not exact"] += 1
                if not is_exact:
                    self._note(f"{kind} of prompt {place}: {text!r} is not {wanted!r}")
            except (httpx.HTTPError, KeyError, ValueError) as error:
                self.counts["failed"] += 1
                self._note(f"{kind}: {type(error).__name__}: {error}")

    async def close(self) -> None:
        await self._client.aclose()

    def _note(self, problem: str) -> None:
        self.problems[f"after {self.latest_fault}: {problem}"[:300]] += 1

    def _body(self, prompt: str, **members: object) -> dict[str, Any]:
        return {"model": NAME, "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, **members}

    async def _whole(self, prompt: str) -> str:
        answer = await self._client.post("/v1/completions", json=self._body(prompt))
        if answer.status_code != 200:
            raise ValueError(f"{answer.status_code} {answer.text[:200]}")
        return str(answer.json()["choices"][0]["text"])

    async def _long(self, prompt: str) -> str:
        return await self._stream(prompt, None, max_tokens=MAX_LONG_TOKENS, ignore_eos=True)

    async def _stream(self, prompt: str, num_pieces: int | None, **members: object) -> str:
        text, left = "", num_pieces
        body = self._body(prompt, stream=True, **members)
        async with self._client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                raise ValueError(f"{answer.status_code} {(await answer.aread())[:200]!r}")
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = orjson.loads(line[6:])
                if "error" in event:
                    raise ValueError(f"within the stream: {event['error']['message']}")
                text += event["choices"][0]["text"]
                left = None if left is None else left - 1
                if left == 0:
                    break
        return text


async def soak(whole: Whole, minutes: float, fault_every_s: float, num_clients: int) -> tuple[Prompts, list[Row]]:
    prompts = Prompts(whole, 1)
    await prompts.learn()
    sizes: dict[str, list[tuple[float, int, int]]] = defaultdict(list)
    keys, until_s, num_faults = list[float](), time.monotonic() + 60 * minutes, 0
    clients = [asyncio.create_task(prompts.ask(until_s)) for _ in range(num_clients)]
    fault_s = time.monotonic() + fault_every_s / 2
    while time.monotonic() < until_s:
        for role, size in (await asyncio.to_thread(whole.sizes)).items():
            sizes[role].append(size)
        keys.append(await asyncio.to_thread(whole.num_keys))
        if time.monotonic() >= fault_s:
            again, place = divmod(num_faults, len(FAULTS))
            prompts.latest_fault = f"{num_faults}, {' '.join(FAULTS[place])}"
            await asyncio.to_thread(whole.inflict, *FAULTS[place], again)
            num_faults, fault_s = num_faults + 1, time.monotonic() + fault_every_s
        await asyncio.sleep(5)
    await asyncio.gather(*clients)
    await prompts.close()
    label = f"{minutes:g} minutes, {num_faults} faults"
    rows = [Row(label, "whole", f"requests: {kind}", count, "") for kind, count in sorted(prompts.counts.items())]
    for role, each in sizes.items():
        for place, (metric, unit) in enumerate((("of its own", "MB"), ("descriptors", ""), ("threads", ""))):
            values = tuple(float(size[place]) for size in each)
            rows.append(Row(label, role, f"{metric}, every 5 s", values[-1], unit, samples=values))
    rows.append(Row(label, "redis", "keys, every 5 s", keys[-1], "", samples=tuple(keys)))
    return prompts, rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--fault-every-s", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--save", action="store_true")
    given = parser.parse_args()
    load = ForeignLoad()
    with tempfile.TemporaryDirectory() as place, running_whole(Path(place)) as whole:
        prompts, rows = asyncio.run(soak(whole, given.minutes, given.fault_every_s, given.clients))
    notes = [f"{count} times: {what}" for what, count in prompts.problems.most_common(20)]
    report = Report("soak-whole", vars(given), rows, [*notes, f"foreign cores: {load.cores():.1f}"])
    report.print()
    if given.save:
        print(report.save())


if __name__ == "__main__":
    main()
