"""A light server of OpenAI's `/v1/completions` in front of an engine: token ids in, tokens out as events.

As small as may be, so that a race with it compares engines. It serves one client, which it trusts: every answer is a
stream of greedy tokens, and what it does not understand it answers with 400 and no more.
"""

import asyncio
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

_MAX_HEADER_BYTES = 1 << 16


@dataclass(frozen=True)
class Delta:
    """Output of one step for one request."""

    request_id: int
    token_ids: Sequence[int]
    is_last: bool = False


@dataclass(frozen=True)
class Asked:
    """A request on its way to the engine; `deltas` is its client's and belongs to the loop."""

    request_id: int
    prompt: list[int]
    num_output: int
    deltas: asyncio.Queue[Delta] = field(default_factory=asyncio.Queue)


class Backend(Protocol):
    """Engine that serves the requests; called on the loop's thread."""

    def begin(self, loop: asyncio.AbstractEventLoop, on_error: Callable[[BaseException], None]) -> None:
        """Called once, before anything else. `on_error` is called on the loop when no more can be served."""
        ...

    def put(self, asked: Asked) -> None:
        """Serve it: exactly `num_output` tokens, greedy, as deltas put on the loop."""
        ...

    def cancel(self, request_id: int) -> None:
        """Forget it; its client has gone."""
        ...


class Server:
    """Connections, kept alive. `decoder()` is a new stream's: it turns its next tokens into text."""

    def __init__(self, backend: Backend, model: str, decoder: Callable[[], Callable[[Sequence[int]], str]]) -> None:
        self._backend = backend
        self._model = model
        self._decoder = decoder
        self._ids = itertools.count(1)

    async def run(self, port: int, listening: asyncio.Event | None = None) -> None:
        """Until cancelled, or until the backend fails; then raises what it raised. `listening` is set once it does."""
        loop = asyncio.get_running_loop()
        failed: asyncio.Future[None] = loop.create_future()
        self._backend.begin(loop, failed.set_exception)
        async with await asyncio.start_server(self._connected, "127.0.0.1", port, limit=_MAX_HEADER_BYTES):
            if listening is not None:
                listening.set()
            await failed

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                await self._answer(head, await reader.readexactly(_content_length(head)), writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, head: bytes, content: bytes, writer: asyncio.StreamWriter) -> None:
        if head.startswith(b"GET /health "):
            writer.write(_response(200, b"{}"))
            return
        try:
            asked = json.loads(content)
            prompt, num_output = [int(token) for token in asked["prompt"]], int(asked["max_tokens"])
        except (ValueError, KeyError, TypeError) as error:
            writer.write(_response(400, json.dumps({"error": {"message": repr(error)}}).encode()))
            return
        await self._stream(Asked(next(self._ids), prompt, num_output), writer)

    async def _stream(self, asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-cache\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        self._backend.put(asked)
        is_whole = False
        try:
            await self._write_deltas(asked, writer)
            is_whole = True
        finally:
            if not is_whole:
                self._backend.cancel(asked.request_id)

    async def _write_deltas(self, asked: Asked, writer: asyncio.StreamWriter) -> None:
        text_of, num_output, is_last = self._decoder(), 0, False
        while not is_last:
            delta = await asked.deltas.get()
            num_output, is_last = num_output + len(delta.token_ids), delta.is_last
            choice = {
                "index": 0,
                "text": text_of(delta.token_ids),
                "token_ids": list(delta.token_ids),
                "finish_reason": "length" if is_last else None,
            }
            writer.write(self._event(asked, [choice]))
            await writer.drain()
        usage = {
            "prompt_tokens": len(asked.prompt),
            "completion_tokens": num_output,
            "total_tokens": len(asked.prompt) + num_output,
        }
        writer.write(self._event(asked, [], usage=usage) + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        await writer.drain()

    def _event(self, asked: Asked, choices: Sequence[Any], **more: Any) -> bytes:
        event = {
            "id": f"cmpl-{asked.request_id}",
            "object": "text_completion",
            "model": self._model,
            "choices": choices,
            **more,
        }
        return _chunk(b"data: " + json.dumps(event).encode() + b"\n\n")


def tokenizer_decoder(path: str) -> Callable[[], Callable[[Sequence[int]], str]]:
    """Decoders of streams, by the checkpoint's tokenizer.json; ids that it does not know are no text."""
    import tokenizers
    from tokenizers.decoders import DecodeStream

    tokenizer = tokenizers.Tokenizer.from_file(path)

    def make() -> Callable[[Sequence[int]], str]:
        stream = DecodeStream(skip_special_tokens=True)
        return lambda token_ids: "".join(_pieces(stream, tokenizer, token_ids))

    return make


def _pieces(stream: Any, tokenizer: Any, token_ids: Sequence[int]) -> Iterator[str]:
    for token_id in token_ids:
        yield stream.step(tokenizer, token_id) or ""


def _content_length(head: bytes) -> int:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    return 0


def _response(status: int, content: bytes) -> bytes:
    reason = {200: "OK", 400: "Bad Request"}[status]
    head = f"HTTP/1.1 {status} {reason}\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)
