"""Mixed traffic of a soak: well-formed requests of every API, refused ones, and clients that leave or read slowly.

Invariant: every request says which statuses it may be answered with; anything else is counted as unexpected, and so is
a text that is not the expected one.
"""

import asyncio
import contextlib
import random
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import orjson

from tandem.core.clock import SystemClock
from tandem.loadtest.failure import ExchangeError
from tandem.loadtest.http_client import HttpClient

TIMEOUT_S = 120.0
MAX_TOKENS = 64
_WORDS = (
    "alpha", "beta", "gamma", "delta", "river", "stone", "cloud",
    "letter", "window", "garden", "market", "bridge", "seven", "orange",
)  # fmt: skip
_STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


class _LeftError(Exception):
    """The client has heard enough."""


@dataclass(slots=True)
class _Answer:
    """A receiver that leaves after `num_chunks` pieces of a body, where that is said."""

    num_chunks: int | None = None
    status: int = 0
    content: bytearray = field(default_factory=bytearray)

    def head(self, status: int, headers: dict[bytes, bytes]) -> None:
        self.status = status

    def body(self, chunk: bytes) -> None:
        self.content += chunk
        if self.num_chunks is not None:
            self.num_chunks -= 1
            if self.num_chunks <= 0:
                raise _LeftError


class Traffic:
    """Clients of one gateway.

    Args:
        url: of the gateway.
        model: what to ask for.
        keys: API keys to ask with, in turn by chance.
        seed: of every choice made here.
        text: what each answer must say; None: unknown.
    """

    def __init__(self, url: str, model: str, keys: Sequence[str], seed: int, text: str | None) -> None:
        parts = urlsplit(url)
        self._host, self._port = str(parts.hostname), int(parts.port or 80)
        self._model, self._keys, self._text = model, list(keys), text
        self._random = random.Random(seed)
        self._clients = [HttpClient(url, _bearer(key), SystemClock()) for key in keys]
        self._stored: deque[tuple[HttpClient, str]] = deque(maxlen=64)
        self._number = 0
        self.counts: Counter[str] = Counter()
        self.statuses: Counter[int] = Counter()
        self.unexpected: Counter[str] = Counter()
        self.num_evicted = 0  # stored responses that could not be continued, as their store is bounded
        kinds = _KINDS
        self._kinds, self._weights = [kind for kind, _ in kinds], [weight for _, weight in kinds]

    @property
    def num_done(self) -> int:
        return self.counts.total()

    async def send(self, num_requests: int, concurrency: int, until_s: float) -> None:
        """So many requests, at most `concurrency` at once; none begins after `until_s` of the monotonic clock."""
        left = iter(range(num_requests))

        async def work() -> None:
            for _ in left:
                if time.monotonic() > until_s:
                    return
                kind = self._random.choices(self._kinds, self._weights)[0]
                self._number += 1
                try:
                    await kind(self)
                except (ExchangeError, OSError, TimeoutError) as error:
                    self.unexpected[f"{kind.__name__}: {type(error).__name__} {error}"[:200]] += 1
                self.counts[kind.__name__.strip("_")] += 1

        await asyncio.gather(*(work() for _ in range(concurrency)))

    async def hold_idle(self, num_streams: int, prompt: Sequence[int]) -> list[asyncio.StreamWriter]:
        """Connections whose streams have begun and say nothing more, as `prompt` has the backend do."""
        gate, held = asyncio.Semaphore(32), list[asyncio.StreamWriter]()

        async def one() -> None:
            body = orjson.dumps({"model": self._model, "prompt": list(prompt), "max_tokens": MAX_TOKENS, **_STREAMED})
            async with gate:
                reader, writer = await asyncio.open_connection(self._host, self._port)
                writer.write(self._head("POST", "/v1/completions", body) + body)
                held.append(writer)
                async with asyncio.timeout(TIMEOUT_S):
                    await reader.readuntil(b"data: ")

        await asyncio.gather(*(one() for _ in range(num_streams)))
        return held

    async def close(self) -> None:
        for client in self._clients:
            await client.close()

    # ---- requests that are served

    async def _chat(self) -> None:
        await self._generate("/v1/chat/completions", self._chat_body())

    async def _conversation(self) -> None:
        turns = [
            {"role": role, "content": self._words(60)} for _ in range(self._random.randint(1, 8))
            for role in ("user", "assistant")
        ]  # fmt: skip
        messages = [{"role": "system", "content": self._words(20)}, *turns, {"role": "user", "content": self._words(9)}]
        await self._generate("/v1/chat/completions", self._chat_body() | {"messages": messages})

    async def _completion(self) -> None:
        ids = [self._random.randrange(100, 4000) for _ in range(self._random.choice((3, 40, 2000)))]
        prompt: object = self._random.choice((self._words(30), ids, [self._words(5), self._words(6)]))
        await self._generate("/v1/completions", self._body(prompt=prompt))

    async def _choices(self) -> None:
        await self._generate("/v1/completions", self._body(prompt=self._words(8), n=self._random.choice((2, 4, 16))))

    async def _stream(self) -> None:
        answer = await self._ask(self._client(), "POST", "/v1/chat/completions", self._chat_body() | _STREAMED)
        if self._expect("stream", answer, 200) and self._text is not None:
            lines = [line[6:] for line in bytes(answer.content).split(b"\n\n") if line.startswith(b"data: {")]
            choices = [choice for line in lines for choice in orjson.loads(line)["choices"]]
            self._check_text("stream", "".join(choice["delta"].get("content") or "" for choice in choices))

    async def _aborted(self) -> None:
        await self._ask(
            self._client(), "POST", "/v1/chat/completions", self._chat_body() | _STREAMED,
            num_chunks=self._random.randint(1, 6),
        )  # fmt: skip

    async def _message(self) -> None:
        body = self._body(messages=[{"role": "user", "content": self._words(20)}])
        is_stream = self._random.random() < 0.5
        self._expect("message", await self._ask(self._client(), "POST", "/v1/messages", body | {"stream": is_stream}))

    async def _tool(self) -> None:
        number = self._random.randrange(10**9)
        schema = {"type": "object", "properties": {f"field_{number}": {"type": "string"}, "days": {"type": "integer"}}}
        function = {"name": f"tool_{number}", "description": self._words(12), "parameters": schema}
        choice = self._random.choice(("auto", "required", {"type": "function", "function": {"name": function["name"]}}))
        body = self._chat_body() | {"tools": [{"type": "function", "function": function}], "tool_choice": choice}
        self._expect("tool", await self._ask(self._client(), "POST", "/v1/chat/completions", body), 200, 400)

    async def _schema(self) -> None:
        names = [f"member_{self._random.randrange(10**9)}" for _ in range(self._random.choice((1, 6, 30)))]
        schema = {"type": "object", "properties": {name: {"type": "string", "maxLength": 40} for name in names}}
        asked = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        body = self._chat_body() | {"response_format": asked}
        self._expect("schema", await self._ask(self._client(), "POST", "/v1/chat/completions", body))

    async def _response(self) -> None:
        client = self._client()
        body: dict[str, Any] = {"model": self._model, "input": self._words(40), "max_output_tokens": MAX_TOKENS}
        if self._stored and self._random.random() < 0.3:
            client, body["previous_response_id"] = self._random.choice(self._stored)
        answer = await self._ask(client, "POST", "/v1/responses", body)
        if "previous_response_id" in body and _is_evicted(answer):
            self.statuses[answer.status] += 1
            self.num_evicted += 1
        elif self._expect("response", answer):
            self._stored.append((client, orjson.loads(answer.content)["id"]))

    async def _response_deleted(self) -> None:
        if self._stored:
            client, response_id = self._stored.popleft()
            answer = await self._ask(client, "DELETE", f"/v1/responses/{response_id}", None)
            self._expect("response deleted", answer, 200, 404)

    async def _tokenized(self) -> None:
        body = {"model": self._model, "prompt": self._words(300)}
        self._expect("tokenized", await self._ask(self._client(), "POST", "/tokenize", body))

    async def _looked_at(self) -> None:
        path = self._random.choice(("/v1/models", "/health", "/ready", "/openapi.json", "/admin/requests/none"))
        self._expect("looked at", await self._ask(self._client(), "GET", path, None), 200, 404)

    # ---- requests that are refused

    async def _bad_field(self) -> None:
        kinds: tuple[dict[str, object], ...] = (
            {"temperature": "hot"}, {"messages": 7}, {"max_tokens": -1}, {"n": 10**6}, {"model": f"m{self._number}"},
            {"messages": []}, {f"unknown_{self._number}": 1}, {"tools": [{}]}, {"top_p": 9}, {"stop": [1]},
        )  # fmt: skip
        wrong = self._random.choice(kinds)
        answer = await self._ask(self._client(), "POST", "/v1/chat/completions", self._chat_body() | wrong)
        self._expect("bad field", answer, 200, 400, 404, 422)

    async def _bad_json(self) -> None:
        data = self._random.choice((
            b"", b"{", b"[]", b"nul", b"\xff\xfe", b"[" * 5000, b'{"a":' * 2000, b'{"messages": "' + b"x" * 9000,
        ))  # fmt: skip
        self._expect("bad json", await self._ask(self._client(), "POST", "/v1/chat/completions", data), 400, 413, 422)

    async def _large(self) -> None:
        size = self._random.choice((10**5, 10**6, 4 * 10**6))
        body = self._chat_body() | {"messages": [{"role": "user", "content": "word " * (size // 5)}]}
        answer = await self._ask(self._client(), "POST", "/v1/chat/completions", body)
        self._expect("large", answer, 200, 400, 413, 429)

    async def _many_keys(self) -> None:
        members = {
            f"key_{self._number}_{place}": place for place in range(self._random.choice((1000, 20_000, 200_000)))
        }
        body = self._chat_body() | {"chat_template_kwargs": members}
        answer = await self._ask(self._client(), "POST", "/v1/chat/completions", body)
        self._expect("many keys", answer, 200, 400, 413, 429)

    async def _unknown_route(self) -> None:
        method = self._random.choice(("GET", "POST", "PUT"))
        path = f"/v1/{self._random.randrange(10**9)}/{'x' * self._random.randrange(200)}"
        self._expect("unknown route", await self._ask(self._client(), method, path, {"a": 1}), 404, 405)

    async def _unknown_key(self) -> None:
        secret = f"sk-tandem-{self._random.randrange(16**40):x}"
        await self._raw(self._head("GET", "/v1/models", b"", key=secret), 401, "unknown key")

    async def _wrong_type(self) -> None:
        body = orjson.dumps(self._chat_body())
        kind = self._random.choice(("text/plain", "application/xml", "multipart/form-data; boundary=x", "json"))
        await self._raw(self._head("POST", "/v1/chat/completions", body, kind=kind) + body, 415, "wrong type")

    async def _no_http(self) -> None:
        noise = self._random.choice((b"\x16\x03\x01\x02\x00\x01", b"GET\r\n\r\n", b"POST / HTTP/9.9\r\n\r\n"))
        await self._raw(noise + b"\r\n\r\n", 400, "no http")

    # ---- clients that behave badly

    async def _half_body(self) -> None:
        """Leaves before its body ends."""
        body = orjson.dumps(self._chat_body())
        _, writer = await asyncio.open_connection(self._host, self._port)
        writer.write(self._head("POST", "/v1/chat/completions", body + b" " * 1000) + body)
        await writer.drain()
        writer.transport.abort()

    async def _slow_reader(self) -> None:
        """Reads a little at a time, then the rest or nothing."""
        body = orjson.dumps(self._chat_body() | _STREAMED)
        reader, writer = await asyncio.open_connection(self._host, self._port, limit=256)
        try:
            writer.write(self._head("POST", "/v1/chat/completions", body) + body)
            async with asyncio.timeout(TIMEOUT_S):
                for _ in range(self._random.randint(1, 10)):
                    if not await reader.read(100):
                        return
                    await asyncio.sleep(0.1)  # NOTE: it is what is tested
        finally:
            writer.transport.abort()

    # ---- parts of requests

    def _client(self) -> HttpClient:
        return self._random.choice(self._clients)

    def _words(self, num_words: int) -> str:
        return " ".join(self._random.choices(_WORDS, k=num_words)) + f" {self._number}"

    def _body(self, **members: object) -> dict[str, Any]:
        return {"model": self._model, "max_tokens": MAX_TOKENS, "temperature": 0, **members}

    def _chat_body(self) -> dict[str, Any]:
        num_words = self._random.choice((5, 40, 400))
        body = self._body(messages=[{"role": "user", "content": self._words(num_words)}])
        number = self._random.randrange(10**9)
        salted = self._random.choice(({}, {"cache_salt": f"salt-{number}"}, {"user": f"user-{number}"}))
        return body | salted

    async def _generate(self, path: str, body: dict[str, Any]) -> None:
        answer = await self._ask(self._client(), "POST", path, body)
        if self._expect(path, answer) and self._text is not None:
            for choice in orjson.loads(answer.content)["choices"]:
                self._check_text(path, choice["message"]["content"] if "message" in choice else choice["text"])

    async def _ask(
        self, client: HttpClient, method: str, path: str, body: object, num_chunks: int | None = None
    ) -> _Answer:
        answer = _Answer(num_chunks)
        data = body if isinstance(body, bytes) else b"" if body is None else orjson.dumps(body)
        with contextlib.suppress(_LeftError):
            await client.exchange(method, path, b"" if method == "GET" else data, answer, TIMEOUT_S)
        return answer

    async def _raw(self, request: bytes, status: int, kind: str) -> None:
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            writer.write(request)
            async with asyncio.timeout(TIMEOUT_S):
                head = await reader.readline()
            words = head.split()
            self._expect(kind, _Answer(status=int(words[1]) if len(words) > 1 else 0), status)
        finally:
            writer.transport.abort()

    def _head(
        self, method: str, path: str, body: bytes, *, key: str | None = None, kind: str = "application/json"
    ) -> bytes:
        lines = [f"{method} {path} HTTP/1.1", f"host: {self._host}:{self._port}"]
        key = key or (self._random.choice(self._keys) or None)
        lines += [f"authorization: Bearer {key}"] if key else []
        lines += [f"content-type: {kind}", f"content-length: {len(body)}"] if method != "GET" else []
        return "\r\n".join((*lines, "", "")).encode()

    def _expect(self, kind: str, answer: _Answer, *statuses: int) -> bool:
        self.statuses[answer.status] += 1
        if answer.status in (statuses or (200,)):
            return True
        self.unexpected[f"{kind}: {answer.status} {bytes(answer.content[:160])!r}"] += 1
        return False

    def _check_text(self, kind: str, text: str) -> None:
        if text != self._text:
            self.unexpected[f"{kind}: the text {text[:80]!r}"] += 1


_KINDS: Sequence[tuple[Callable[[Traffic], Awaitable[None]], float]] = (
    (Traffic._chat, 20), (Traffic._conversation, 6), (Traffic._completion, 12), (Traffic._choices, 2),
    (Traffic._stream, 12), (Traffic._aborted, 10), (Traffic._message, 6), (Traffic._tool, 2), (Traffic._schema, 2),
    (Traffic._response, 5), (Traffic._response_deleted, 1), (Traffic._tokenized, 2), (Traffic._looked_at, 2),
    (Traffic._bad_field, 5), (Traffic._bad_json, 4), (Traffic._large, 0.2), (Traffic._many_keys, 0.2),
    (Traffic._unknown_route, 3), (Traffic._unknown_key, 2), (Traffic._wrong_type, 1), (Traffic._no_http, 1),
    (Traffic._half_body, 1), (Traffic._slow_reader, 0.6),
)  # fmt: skip


def _is_evicted(answer: _Answer) -> bool:
    """Whether a response cannot be continued since the store has evicted it, or a concurrent request deleted it."""
    return answer.status == 400 and orjson.loads(answer.content)["error"]["code"] == "previous_response_not_found"


def _bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}
