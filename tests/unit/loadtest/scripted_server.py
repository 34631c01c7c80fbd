"""An HTTP server that answers by a script, down to single bytes: what no well-behaved gateway would ever send."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tandem.core.clock import SystemClock
from tandem.loadtest.endpoint import GatewayEndpoint
from tandem.loadtest.plan import Arrivals, LoadPlan
from tandem.workload.lengths import Fixed
from tandem.workload.slo import Slo

STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nx-request-id: r1\r\n"
MODELS = {"data": [{"id": "scripted", "max_model_len": 4096}]}


def event(value: object) -> bytes:
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"


def token_event(*token_ids: int) -> bytes:
    return event({"choices": [{"index": 0, "text": "x", "token_ids": token_ids}]})


def usage_event(num_tokens: int, num_cached: int = 0) -> bytes:
    details = {"cached_tokens": num_cached}
    return event({"choices": [], "usage": {"completion_tokens": num_tokens, "prompt_tokens_details": details}})


DONE = event(b"[DONE]")


def error_answer(status: int, code: str, **headers: str) -> bytes:
    body = json.dumps({"error": {"message": f"it is {code}", "code": code}}).encode()
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {status} No\r\ncontent-length: {len(body)}\r\n{lines}\r\n".encode() + body


def json_answer(value: object, status: int = 200) -> bytes:
    body = json.dumps(value).encode()
    return b"HTTP/1.1 %d OK\r\ncontent-length: %d\r\n\r\n" % (status, len(body)) + body


class Speaker:
    """Writes one answer to one client."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer

    async def raw(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def begin(self) -> None:
        await self.raw(STREAM_HEAD + b"transfer-encoding: chunked\r\n\r\n")

    async def chunk(self, data: bytes) -> None:
        await self.raw(b"%x\r\n%s\r\n" % (len(data), data))

    async def end(self) -> None:
        await self.raw(b"0\r\n\r\n")

    async def whole(self, *events: bytes) -> None:
        """A whole stream."""
        await self.begin()
        for each in events:
            await self.chunk(each)
        await self.end()

    async def tokens(self, count: int) -> None:
        """A right answer of `count` tokens."""
        await self.whole(*(token_event(index) for index in range(count)), usage_event(count), DONE)

    def cut(self) -> None:
        self._writer.transport.abort()


Script = Callable[[dict[str, Any], Speaker], Awaitable[None]]


async def right_answer(body: dict[str, Any], speaker: Speaker) -> None:
    await speaker.tokens(body["max_tokens"])


@dataclass(eq=False)
class ScriptedServer:
    """`asked`: each body that came; `heads`: of every request; `pages`: answers to GETs by path."""

    script: Script = right_answer
    pages: dict[str, bytes] = field(default_factory=dict)
    asked: list[dict[str, Any]] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    num_connections: int = 0
    num_open: int = 0
    most_open: int = 0
    came: asyncio.Event = field(default_factory=asyncio.Event)
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def until_asked(self, count: int) -> None:
        """Wait until that many requests have come."""
        async with asyncio.timeout(10):
            while len(self.asked) < count:
                self.came.clear()
                await self.came.wait()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                await self._answer(head, reader, Speaker(writer))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.transport.abort()

    async def _answer(self, head: str, reader: asyncio.StreamReader, speaker: Speaker) -> None:
        self.heads.append(head)
        method, path, _ = head.split(" ", 2)
        if method == "GET":
            await speaker.raw(self.pages.get(path, json_answer({}, 404)))
            return
        length = next(line.split(":")[1] for line in head.splitlines() if line.startswith("content-length"))
        self.asked.append(json.loads(await reader.readexactly(int(length))))
        self.came.set()
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            await self.script(self.asked[-1], speaker)
        finally:
            self.num_open -= 1


@contextlib.asynccontextmanager
async def scripted_server(
    script: Script = right_answer, pages: Mapping[str, bytes] | None = None
) -> AsyncIterator[ScriptedServer]:
    """A listening server for the time of the block; open requests are then dropped."""
    scripted = ScriptedServer(script, {"/v1/models": json_answer(MODELS), **(pages or {})})
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        with contextlib.suppress(asyncio.CancelledError):
            await scripted._serve(reader, writer)
        tasks.discard(task)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    scripted.port = server.sockets[0].getsockname()[1]
    try:
        yield scripted
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.wait_closed()


def load_plan(url: str, **options: Any) -> LoadPlan:
    """A short test of prompts of 8 tokens and answers of 4."""
    values: dict[str, Any] = {
        "url": url,
        "admin_url": url,
        "model": None,
        "api_key": None,
        "ready_timeout_s": 0.0,
        "arrivals": Arrivals(concurrency=2),
        "prompt_lengths": Fixed(8),
        "output_lengths": Fixed(4),
        "turns": Fixed(1),
        "shared_prefix_share": 0.0,
        "num_prefixes": 1,
        "token_ids": (10, 200),
        "ignore_eos": True,
        "temperature": 0.0,
        "duration_s": None,
        "num_requests": 6,
        "warm_up_s": 0.0,
        "request_timeout_s": 5.0,
        "max_open": 100,
        "seed": 0,
        "slo": Slo(1.0, 1.0),
        "window_s": 0.1,
        "poll_s": 0.0,
    }
    return LoadPlan(**values | options)


@contextlib.asynccontextmanager
async def opened(url: str, **options: Any) -> AsyncIterator[GatewayEndpoint]:
    """An endpoint that knows its server; its time is now zero."""
    clock = SystemClock()
    endpoint = GatewayEndpoint(load_plan(url, **options), clock)
    try:
        await endpoint.open()
        endpoint.begin(clock.now_s())
        yield endpoint
    finally:
        await endpoint.close()
