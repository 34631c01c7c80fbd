"""A body that does not come holds nobody else up."""

import asyncio
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from starlette.types import Message

from tandem.gateway import body
from tandem.gateway.body import Bodies, BodyLimits
from tandem.gateway.errors import RequestError
from tests.helpers.fake_backend import JSON_HEAD, MODEL, SAYS_JSON, FakeCluster, eventually, tell

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
READERS = ("/tokenize", "/v1/messages/count_tokens", "/v1/responses/input_tokens", "/v1/chat/completions")


async def begun_upload(cluster: FakeCluster, path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A request whose body is waited for."""
    url = httpx.URL(cluster.url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    head = f"POST {path} HTTP/1.1\r\n{JSON_HEAD}content-length: 10\r\nexpect: 100-continue\r\n\r\n"
    writer.write(head.encode())
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    return reader, writer


@pytest.mark.parametrize("path", READERS)
def test_an_upload_takes_no_place(tmp_path: Path, path: str) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        uploads = [await begun_upload(cluster, path) for _ in range(2)]
        assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
        for _, writer in uploads:
            writer.close()

    tell(tmp_path, story, max_concurrent_requests=2)


@pytest.mark.parametrize("path", READERS)
def test_an_upload_that_does_not_end_is_refused(tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        monkeypatch.setattr(body, "BODY_TIMEOUT_S", 0.05)
        reader, writer = await begun_upload(cluster, path)
        answer = await asyncio.wait_for(reader.read(), 10)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"within 0.05 s" in answer
        writer.close()

    tell(tmp_path, story)


def test_pieces_that_keep_coming_do_not_put_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    async def receive() -> Message:
        await asyncio.sleep(0)
        return {"type": "http.request", "body": b"x" if bodies.num_held_bytes < 10 else b"", "more_body": True}

    monkeypatch.setattr(body, "BODY_TIMEOUT_S", 0.05)
    bodies = Bodies(BodyLimits(10**6, 10**6, 10**6), 10**6, 10**6)
    with pytest.raises(RequestError, match="did not come to its end") as refusal:
        asyncio.run(bodies.read(receive, {"headers": [(b"content-type", b"application/json")]}))
    assert refusal.value.status == 408
    assert bodies.num_held_bytes == 0


def test_small_pieces_take_the_memory_of_their_bytes() -> None:
    """Regression: each was kept as an object of its own, 20 times what it was charged for."""
    peaks: list[int] = []
    for num_pieces in (1, 40_000):
        body_bytes = b'"' + b"x" * 79_998 + b'"'
        size = len(body_bytes) // num_pieces
        places = iter(range(0, len(body_bytes), size))

        async def receive(data: bytes = body_bytes, size: int = size, places: Iterator[int] = places) -> Message:
            start = next(places)
            return {"type": "http.request", "body": data[start : start + size], "more_body": start + size < len(data)}

        bodies = Bodies(BodyLimits(10**6, 10**6, 10**6), 10**6, 10**6)
        tracemalloc.start()
        with asyncio.run(bodies.read(receive, {"headers": [(b"content-type", b"application/json")]})) as read:
            peaks.append(tracemalloc.get_traced_memory()[1])
            assert read.data == body_bytes
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 200_000


KIB = 1024


async def begun_part(cluster: FakeCluster, path: str, num_bytes: int) -> asyncio.StreamWriter:
    """An upload that has sent so much and does not end."""
    url = httpx.URL(cluster.url)
    _, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(f"POST {path} HTTP/1.1\r\n{JSON_HEAD}content-length: {1000 * KIB}\r\n\r\n".encode())
    writer.write(b"x" * num_bytes)
    await writer.drain()
    return writer


@pytest.mark.parametrize("path", [*READERS, "/v1/responses"])
def test_all_uploads_together_are_bounded(tmp_path: Path, path: str) -> None:
    """Each upload had its limit, but there could be any number, before anything else counted them."""

    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        bodies = cluster.gateway.gateway.bodies
        bodies.max_held_bytes = 1000 * KIB
        uploads = [await begun_part(cluster, path, 364 * KIB) for _ in range(3)]
        await eventually(lambda: bodies.num_held_bytes == 900 * KIB)
        refused = await client.post(path, content=b"x" * 300 * KIB, headers=SAYS_JSON)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
        assert bodies.num_held_bytes == 900 * KIB
        uploads[0].close()
        await eventually(lambda: bodies.num_held_bytes == 600 * KIB)
        assert (await client.post(path, content=b"x" * 300 * KIB, headers=SAYS_JSON)).status_code == 400
        assert bodies.num_held_bytes == 600 * KIB
        for writer in uploads[1:]:
            writer.transport.abort()
        await eventually(lambda: bodies.num_held_bytes == 0)

    tell(tmp_path, story, num_workers=1)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_body_is_not_held_while_it_is_answered(tmp_path: Path, is_stream: bool) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        worker, bodies = cluster.workers[0], cluster.gateway.gateway.bodies
        worker.hold_at = 1
        asked = {**CHAT, "stream": is_stream, "user": "x" * 300 * KIB}
        answer = asyncio.create_task(client.post("/v1/chat/completions", json=asked))
        await asyncio.wait_for(worker.reached.wait(), 10)
        assert bodies.num_held_bytes == 0
        worker.go.set()
        assert (await answer).status_code == 200

    tell(tmp_path, story, num_workers=1)


@pytest.mark.parametrize("path", [*READERS, "/v1/responses"])
def test_what_was_read_is_held_until_it_is_refused(tmp_path: Path, path: str) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        answer = await client.post(path, json={"model": MODEL, "sparkle": "x" * 300 * KIB})
        assert answer.status_code == 400
        assert cluster.gateway.gateway.bodies.num_held_bytes == 0

    tell(tmp_path, story, num_workers=1)


def test_the_bound_has_room_for_one_body(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = BodyLimits(1000 * KIB, 3000, 500)
    monkeypatch.setattr(body, "total_bytes", lambda: 100 * KIB)
    small = Bodies.for_this_machine(limits)
    assert small.max_held_bytes == small.max_key_bytes == limits.max_charge == 1000 * KIB + 64 * 3500
    monkeypatch.setattr(body, "total_bytes", lambda: 2**40)
    large = Bodies.for_this_machine(limits)
    assert (large.max_held_bytes, large.max_key_bytes) == (512 * 2**20, 128 * 2**20)
    monkeypatch.setattr(body, "total_bytes", lambda: 2**30)
    assert Bodies.for_this_machine(limits).max_held_bytes == 2**28
