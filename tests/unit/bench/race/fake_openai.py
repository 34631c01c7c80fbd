"""A real uvicorn that speaks `/v1/completions` by a script, and a system of the race around it."""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from socket import create_server
from typing import Any

import uvicorn

from bench.race.system import NotHere, Served

START_S = 60.0
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


@dataclass
class Script:
    """Form of the answers. `refuse_from`: requests from this one on (0 = the first) get 500."""

    per_event: int = 1
    tells_ids: bool = True
    tells_usage: bool = True
    extra_tokens: int = 0
    extra_prompt_tokens: int = 0
    cut: bool = False
    refuse_from: int | None = None
    hold_after: int | None = None


class FakeOpenAI:
    """The application. It answers tokens 7, 8, 9 and so on. `resume` ends the pause that `hold_after` asks for."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.bodies: list[dict[str, Any]] = []
        self.num_open = 0
        self.most_open = 0
        self.resume = threading.Event()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        body = json.loads(await _body(receive))
        self.bodies.append(body)
        if self.script.refuse_from is not None and len(self.bodies) > self.script.refuse_from:
            await _whole(send, 500, {"error": {"message": "it is broken", "code": "internal_error"}})
            return
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            await self._stream(body, send)
        finally:
            self.num_open -= 1

    async def _stream(self, body: dict[str, Any], send: Send) -> None:
        script = self.script
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        num_output = body["max_tokens"] + script.extra_tokens
        for start in range(0, num_output, script.per_event):
            if start == script.hold_after:
                await asyncio.to_thread(self.resume.wait, START_S)
            ids = [7 + i for i in range(start, min(start + script.per_event, num_output))]
            choice: dict[str, Any] = {"index": 0, "text": "w" * len(ids)}
            await _event(send, {"choices": [choice | ({"token_ids": ids} if script.tells_ids else {})]})
            await asyncio.sleep(0)
        if script.tells_usage:
            usage = {"prompt_tokens": len(body["prompt"]) + script.extra_prompt_tokens, "completion_tokens": num_output}
            await _event(send, {"choices": [], "usage": usage | {"prompt_tokens_details": {"cached_tokens": 4}}})
        if not script.cut:
            await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": True})
        await send({"type": "http.response.body", "body": b""})


@dataclass
class FakeSystem:
    """`scripts`: of its first, second, … start; the last one counts for all further starts."""

    name: str
    scripts: Sequence[Script] = (Script(),)
    absent: str = ""
    fails_to_start: str = ""
    apps: list[FakeOpenAI] = field(default_factory=list)
    num_prepared: int = 0
    is_up: bool = False

    def prepare(self) -> None:
        self.num_prepared += 1
        if self.absent:
            raise NotHere(self.absent)

    @contextmanager
    def serve(self, checkpoint: Path) -> Iterator[Served]:
        if self.fails_to_start:
            raise OSError(self.fails_to_start)
        app = FakeOpenAI(self.scripts[min(len(self.apps), len(self.scripts) - 1)])
        self.apps.append(app)
        with listening(app) as url:
            self.is_up = True
            try:
                yield Served(url, "m", ())
            finally:
                self.is_up = False

    def body(self, prompt: Sequence[int], num_output: int) -> dict[str, object]:
        return {"ignore_eos": True, "temperature": 0.0}


@contextmanager
def listening(app: FakeOpenAI) -> Iterator[str]:
    """Its address."""
    config = uvicorn.Config(app, ws="none", lifespan="off", log_config=None, timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    with create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            app.resume.set()
            server.should_exit = True
            thread.join(START_S)
            assert not thread.is_alive()


async def _body(receive: Receive) -> bytes:
    content = b""
    while True:
        message = await receive()
        content += bytes(message.get("body", b""))
        if not message.get("more_body"):
            return content


async def _event(send: Send, value: object) -> None:
    data = b"data: " + json.dumps(value).encode() + b"\n\n"
    await send({"type": "http.response.body", "body": data, "more_body": True})


async def _whole(send: Send, status: int, value: object) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(value).encode()})
