"""Limits in length and time of everything before a body."""

import asyncio
import contextlib
import json
import socket
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
import uvicorn
from starlette.responses import Response
from uvicorn.server import ServerState

from tandem.gateway import http_protocol
from tandem.gateway.body import BODY_TIMEOUT_S
from tandem.gateway.http_protocol import HEAD_TIMEOUT_S, MAX_HEAD_BYTES, LimitedHttpProtocol
from tests.helpers.fake_backend import JSON_HEAD, MODEL, FakeCluster, tell

HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"
CHUNKED = f"POST /tokenize HTTP/1.1\r\n{JSON_HEAD}transfer-encoding: chunked\r\n\r\n".encode()
KEEP_ALIVE_S = 65


class Line(asyncio.Transport):
    """A connection to an app that answers without a look at the body, with a clock that the test moves."""

    def __init__(self, state: ServerState | None = None, max_connections: int | None = None) -> None:
        super().__init__()
        self.said = b""
        self.is_closed = False
        self._now_s = 0.0
        self._timers: list[tuple[float, asyncio.Handle]] = []
        config = uvicorn.Config(
            Response(status_code=401), interface="asgi3", ws="none", lifespan="off", log_config=None
        )
        config.timeout_keep_alive = KEEP_ALIVE_S
        self._loop = asyncio.get_running_loop()
        loop = cast(asyncio.AbstractEventLoop, self)
        self._protocol = LimitedHttpProtocol(config, state or ServerState(), {}, loop, max_connections=max_connections)
        self._protocol.connection_made(self)

    def leave(self) -> None:
        self._protocol.connection_lost(None)

    async def hear(self, data: bytes) -> None:
        """All that follows of it has happened."""
        self._protocol.data_received(data)
        await asyncio.gather(*self._protocol.tasks)

    def pass_s(self, seconds: float) -> None:
        self._now_s += seconds
        due = [timer for at_s, timer in self._timers if at_s <= self._now_s]
        self._timers = [(at_s, timer) for at_s, timer in self._timers if at_s > self._now_s]
        for timer in due:
            if not timer.cancelled():
                timer._run()

    def call_later(self, delay_s: float, call: Callable[[], None]) -> asyncio.Handle:
        timer = asyncio.Handle(call, (), self._loop)
        self._timers.append((self._now_s + delay_s, timer))
        return timer

    def create_task(self, work: Coroutine[Any, Any, None], **options: Any) -> asyncio.Task[None]:
        return self._loop.create_task(work, **options)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.said += bytes(data)

    def close(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


async def answered(cluster: FakeCluster, pieces: Iterable[bytes]) -> bytes:
    """All that the server says until it closes the connection."""

    def talk() -> bytes:
        url = httpx.URL(cluster.url)
        with socket.create_connection((url.host, url.port or 80), timeout=10) as client:
            with contextlib.suppress(ConnectionError):
                for piece in pieces:
                    client.sendall(piece)
            said = b""
            with contextlib.suppress(ConnectionError):
                while piece := client.recv(1 << 16):
                    said += piece
            return said

    return await asyncio.to_thread(talk)


@pytest.mark.parametrize(
    "pieces",
    [
        [HEALTH, *[b"a: b\r\n" * 11_000] * 16],
        [HEALTH, b"a: ", *[b"b" * 65_536] * 16],
        [HEALTH, *[b"a" * 65_536] * 16],
        [b"GET /", *[b"a" * 65_536] * 16],
        [HEALTH + b"a: " + b"b" * (MAX_HEAD_BYTES + 1) + b"\r\n\r\n"],
        [CHUNKED, b"1\r\n{\r\n0\r\n", *[b"a: b\r\n" * 11_000] * 16],
        [CHUNKED, b"1;", *[b"a" * 65_536] * 16],
    ],
    ids=["headers", "a value", "a name", "a url", "a whole head", "trailers", "a chunk's extension"],
)
def test_a_head_that_is_too_long_ends_the_connection(tmp_path: Path, pieces: list[bytes]) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        said = await answered(cluster, pieces)
        assert said.count(b"HTTP/1.1 431 ") == 1
        assert said.endswith(b"}")
        assert f"longer than {MAX_HEAD_BYTES} bytes".encode() in said
        assert (await client.get("/health")).status_code == 200

    tell(tmp_path, story)


def test_the_limit_is_of_one_request_and_not_of_its_body(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        body = {"model": MODEL, "prompt": "a" * 200_000}
        for _ in range(3):
            answer = await client.post("/tokenize", json=body, headers={"x-long": "a" * (MAX_HEAD_BYTES - 1000)})
            assert answer.status_code == 200
        long = HEALTH + b"x-long: " + b"a" * 40_000 + b"\r\n"
        said = await answered(cluster, [(long + b"\r\n") * 3 + long + b"connection: close\r\n\r\n"])
        assert said.count(b"HTTP/1.1 200 ") == 4

    tell(tmp_path, story)


def test_a_head_that_does_not_end_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        for begun in ([], [b"\r\n"], [HEALTH]):
            assert await answered(cluster, begun) == b""
        said = await answered(cluster, [HEALTH + b"\r\n" + HEALTH])
        assert said.count(b"HTTP/1.1 200 ") == 1

    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", 0.05)
    tell(tmp_path, story)


UPGRADE = "connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n"


@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize("in_pieces", [False, True])
def test_a_request_that_offers_http2_keeps_its_body(tmp_path: Path, is_chunked: bool, in_pieces: bool) -> None:
    """httptools skipped the body, and the request was refused as one of length zero."""

    async def story(cluster: FakeCluster, _: httpx.AsyncClient) -> None:
        body = json.dumps({"model": MODEL, "prompt": "hello"}).encode()
        framing = "transfer-encoding: chunked" if is_chunked else f"content-length: {len(body)}"
        sent = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body) if is_chunked else body
        head = f"POST /tokenize HTTP/1.1\r\n{JSON_HEAD}{UPGRADE}{framing}\r\n\r\n".encode()
        last = HEALTH + b"connection: close\r\n\r\n"
        whole = head + sent + head + sent + last
        said = await answered(cluster, [whole[n : n + 7] for n in range(0, len(whole), 7)] if in_pieces else [whole])
        assert said.count(b"HTTP/1.1 200 ") == 3
        assert said.count(b'"tokens":') == 2

    tell(tmp_path, story)


def test_any_number_of_offers_may_come_in_one_read(tmp_path: Path) -> None:
    """Each was parsed within the one before, until the interpreter refused."""

    async def story(cluster: FakeCluster, _: httpx.AsyncClient) -> None:
        offer = HEALTH + b"connection: Upgrade\r\nupgrade: h2c\r\n\r\n"
        num_offers = 60_000 // len(offer)
        assert num_offers > 500
        said = await answered(cluster, [offer * num_offers + HEALTH + b"connection: close\r\n\r\n"])
        assert said.count(b"HTTP/1.1 200 ") == num_offers + 1

    tell(tmp_path, story)


def test_connect_is_answered_once(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, _: httpx.AsyncClient) -> None:
        said = await answered(cluster, [b"CONNECT a:1 HTTP/1.1\r\nhost: a:1\r\nconnection: close\r\n\r\n"])
        assert said.count(b"HTTP/1.1 ") == 1

    tell(tmp_path, story)


def upload(num_bytes: int) -> bytes:
    return f"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: {num_bytes}\r\n\r\n".encode()


def test_a_body_may_come_after_its_answer_and_the_connection_is_kept() -> None:
    async def story() -> None:
        line = Line()
        for number in range(1, 3):
            await line.hear(upload(3))
            assert line.said.count(b"HTTP/1.1 401 ") == number
            for _ in range(3):
                line.pass_s(HEAD_TIMEOUT_S + 1)
                await line.hear(b"a")
            line.pass_s(KEEP_ALIVE_S - 1)
            assert not line.is_closed
        line.pass_s(2)
        assert line.is_closed

    asyncio.run(story())


def test_a_body_that_trickles_after_its_answer_is_given_up() -> None:
    async def story() -> None:
        line = Line()
        await line.hear(upload(1000))
        for _ in range(int(BODY_TIMEOUT_S) - 1):
            line.pass_s(1)
            await line.hear(b"a")
        assert not line.is_closed
        line.pass_s(1)
        assert line.is_closed

    asyncio.run(story())


@pytest.mark.parametrize("head", [b"GET / HTTP/1.1\r\n", b"\r\n"])
def test_the_head_that_follows_such_a_body_is_limited_in_time_too(head: bytes) -> None:
    async def story() -> None:
        for pieces in ([b"abc", head], [b"abc" + head]):
            line = Line()
            await line.hear(upload(3))
            for piece in pieces:
                await line.hear(piece)
            line.pass_s(KEEP_ALIVE_S if head == b"\r\n" else HEAD_TIMEOUT_S)
            assert line.is_closed

    asyncio.run(story())


class Loop:
    """Calls later when told to."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], object]] = []

    def call_later(self, _: float, call: Callable[..., object], *arguments: object) -> None:
        self.calls.append(lambda: call(*arguments))


class Writing:
    """A connection whose client has yet to read `num_left` bytes."""

    def __init__(self) -> None:
        self.num_left, self.was_aborted, self.loop = 1000, False, Loop()
        self.protocol = cast(Any, object.__new__(LimitedHttpProtocol))
        self.protocol.loop, self.protocol.transport = self.loop, self
        self.protocol.flow = SimpleNamespace(write_paused=True)
        self.protocol.cycle = SimpleNamespace(response_complete=False)

    def get_write_buffer_size(self) -> int:
        return self.num_left

    def abort(self) -> None:
        self.was_aborted = True

    def pass_time(self) -> None:
        calls, self.loop.calls = self.loop.calls, []
        for call in calls:
            call()


def test_a_client_that_reads_slowly_has_a_minute_for_the_last_words_and_a_deaf_one_has_not() -> None:
    writing = Writing()
    writing.protocol._give_up_unread()
    for _ in range(3):
        writing.num_left -= 1
        writing.pass_time()
        assert not writing.was_aborted
    writing.pass_time()
    assert writing.was_aborted
    trickling = Writing()
    trickling.protocol._give_up_unread()
    for _ in range(6):
        assert not trickling.was_aborted
        trickling.num_left -= 1
        trickling.pass_time()
    assert trickling.was_aborted


@pytest.mark.parametrize("change", ["next", "complete", "flowing"])
def test_what_comes_after_a_request_that_failed_is_not_cut_off(change: str) -> None:
    writing = Writing()
    writing.protocol._give_up_unread()
    if change == "next":
        writing.protocol.cycle = SimpleNamespace(response_complete=False)
    elif change == "complete":
        writing.protocol.cycle.response_complete = True
    else:
        writing.protocol.flow.write_paused = False
    writing.pass_time()
    assert not writing.was_aborted
    assert writing.loop.calls == []


def test_connections_beyond_the_limit_are_told_so_and_those_within_it_are_served() -> None:
    """Regression: strangers' idle connections could take every descriptor, those to routers and workers among them."""

    async def story() -> None:
        state = ServerState()
        within = [Line(state, max_connections=2) for _ in range(2)]
        beyond = Line(state, max_connections=2)
        assert beyond.said.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1\r\n" in beyond.said
        assert b"this gateway has 2 connections" in beyond.said
        assert beyond.is_closed
        beyond.leave()
        for line in within:
            await line.hear(HEALTH + b"\r\n")
            assert line.said.startswith(b"HTTP/1.1 401 ")
        within[0].leave()
        assert not Line(state, max_connections=2).is_closed

    asyncio.run(story())
