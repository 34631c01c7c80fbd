"""The light server, spoken to by the race's own client and by hand: exact answers, and no wait for what never comes."""

import asyncio
import json
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from bench.race.client import Client
from bench.race.peers.process import ports
from bench.race.peers.scripts.completions import Asked, Delta, Server, tokenizer_decoder
from bench.race.system import Served
from tests.helpers.tokenizers import write_byte_tokenizer

LIMIT_S = 20.0
OnError = Callable[[BaseException], None]


class Scripted:
    """Answers at once with 100, 101 and so on, `per_delta` at a time; holds what is asked of it with `hold`."""

    def __init__(self, per_delta: int = 1, hold: bool = False) -> None:
        self.per_delta = per_delta
        self.hold = hold
        self.asked: asyncio.Queue[Asked] = asyncio.Queue()
        self.cancelled: asyncio.Queue[int] = asyncio.Queue()
        self.on_error: OnError = lambda error: None

    def begin(self, loop: asyncio.AbstractEventLoop, on_error: OnError) -> None:
        self.on_error = on_error

    def put(self, asked: Asked) -> None:
        self.asked.put_nowait(asked)
        tokens = list(range(100, 100 + asked.num_output))
        for first in range(0, 0 if self.hold else len(tokens), self.per_delta):
            part = tokens[first : first + self.per_delta]
            asked.deltas.put_nowait(Delta(asked.request_id, part, first + len(part) == len(tokens)))

    def cancel(self, request_id: int) -> None:
        self.cancelled.put_nowait(request_id)


def words() -> Callable[[Sequence[int]], str]:
    return lambda token_ids: "".join(f" {token}" for token in token_ids)


def serve(backend: Scripted, check: Callable[[int], Coroutine[Any, Any, None]]) -> None:
    """Run the check, which gets the port, beside the server."""

    async def both() -> None:
        (port,), listening = ports(1), asyncio.Event()
        running = asyncio.create_task(Server(backend, "m", words).run(port, listening))
        await asyncio.wait_for(listening.wait(), LIMIT_S)
        try:
            await asyncio.wait_for(check(port), LIMIT_S)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    asyncio.run(both())


async def posted(port: int, content: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % len(content) + content)
    await writer.drain()
    return reader, writer


@pytest.mark.parametrize("per_delta", [1, 3])
def test_the_client_of_the_race_is_content(per_delta: int) -> None:
    backend = Scripted(per_delta)

    async def check(port: int) -> None:
        client = Client(Served(f"http://127.0.0.1:{port}", "m", ()), lambda *_: {}, LIMIT_S)
        answers = await asyncio.gather(*(client.ask([1, 2, number], 7) for number in range(8)))
        await client.close()
        assert {answer.token_ids for answer in answers} == {tuple(range(100, 107))}
        assert [sum(count for _, count in answer.arrivals) for answer in answers] == [7] * 8
        prompts = [(await backend.asked.get()).prompt for _ in range(8)]
        assert sorted(prompts) == [[1, 2, number] for number in range(8)]

    serve(backend, check)


def test_events_are_openai_s() -> None:
    async def check(port: int) -> None:
        reader, writer = await posted(port, json.dumps({"prompt": [1, 2], "max_tokens": 2}).encode())
        text = (await reader.readuntil(b"\r\n0\r\n\r\n")).decode()
        writer.close()
        head, _, content = text.partition("\r\n\r\n")
        assert head.startswith("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream")
        events = [line.removeprefix("data: ") for line in content.splitlines() if line.startswith("data: ")]
        first, last, usage = (json.loads(event) for event in events[:-1])
        assert first["choices"] == [{"index": 0, "text": " 100", "token_ids": [100], "finish_reason": None}]
        assert last["choices"][0]["finish_reason"] == "length"
        assert usage["usage"] == {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}
        assert events[-1] == "[DONE]"

    serve(Scripted(), check)


@pytest.mark.parametrize("content", [b"{", b"{}", b'{"prompt": "text", "max_tokens": 2}', b'{"prompt": [1]}'])
def test_what_it_does_not_understand_is_refused(content: bytes) -> None:
    async def check(port: int) -> None:
        reader, writer = await posted(port, content)
        assert (await reader.readline()).startswith(b"HTTP/1.1 400")
        writer.close()

    serve(Scripted(), check)


def test_health_and_a_request_on_one_connection() -> None:
    async def check(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(2):
            writer.write(b"GET /health HTTP/1.1\r\n\r\n")
            assert (await reader.readuntil(b"{}")).startswith(b"HTTP/1.1 200")
        writer.close()

    serve(Scripted(), check)


def test_a_client_that_goes_is_forgotten() -> None:
    backend = Scripted(hold=True)

    async def check(port: int) -> None:
        _, writer = await posted(port, json.dumps({"prompt": [1, 2], "max_tokens": 2}).encode())
        asked = await backend.asked.get()
        writer.transport.abort()
        while backend.cancelled.empty():
            asked.deltas.put_nowait(Delta(asked.request_id, [7]))
            await asyncio.sleep(0)
        assert backend.cancelled.get_nowait() == asked.request_id

    serve(backend, check)


def test_a_backend_that_fails_ends_the_server() -> None:
    async def both() -> None:
        backend, listening = Scripted(hold=True), asyncio.Event()
        (port,) = ports(1)
        running = asyncio.create_task(Server(backend, "m", words).run(port, listening))
        await asyncio.wait_for(listening.wait(), LIMIT_S)
        backend.on_error(RuntimeError("out of memory"))
        with pytest.raises(RuntimeError, match="out of memory"):
            await asyncio.wait_for(running, LIMIT_S)

    asyncio.run(both())


def test_text_is_the_tokenizer_s_and_unknown_ids_are_none(tmp_path: Path) -> None:
    path = str(write_byte_tokenizer(tmp_path) / "tokenizer.json")
    token_ids = tokenizers.Tokenizer.from_file(path).encode("né").ids
    assert len(token_ids) == 3
    make = tokenizer_decoder(path)
    decode, other = make(), make()
    assert [decode([token_id]) for token_id in token_ids] == ["n", "", "é"]
    assert other([10**6, *token_ids]) == "né"
