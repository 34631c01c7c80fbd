"""What comes before a body is limited in length and in time."""

import asyncio
import contextlib
import socket
from collections.abc import Iterable
from pathlib import Path

import httpx
import pytest

from tandem.gateway import http_protocol
from tandem.gateway.http_protocol import MAX_HEAD_BYTES
from tests.helpers.fake_backend import MODEL, FakeCluster, tell

HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n"
CHUNKED = b"POST /tokenize HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


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
