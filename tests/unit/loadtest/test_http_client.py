"""The client takes what HTTP allows, tells what it does not, and never mixes two answers."""

import asyncio
import contextlib
from typing import Any

import pytest

from tandem.core.clock import SystemClock
from tandem.core.errors import ConfigurationError
from tandem.loadtest.failure import CONNECT, CUT, MALFORMED, TIMEOUT, ExchangeError
from tandem.loadtest.http_client import HttpClient
from tests.unit.loadtest.scripted_server import ScriptedServer, Speaker, json_answer, scripted_server


async def fetch(page: bytes, times: int = 1) -> tuple[list[tuple[int, bytes]], ScriptedServer]:
    async with scripted_server(pages={"/x": page}) as server:
        client = HttpClient(server.url, {}, SystemClock())
        try:
            found = [await client.get("/x", 5.0) for _ in range(times)]
        finally:
            await client.close()
    return [(answer.status, answer.content) for answer in found], server


def problem_of(page: bytes) -> str:
    with pytest.raises(ExchangeError) as caught:
        asyncio.run(fetch(page))
    return caught.value.kind


def test_a_connection_is_kept() -> None:
    found, server = asyncio.run(fetch(json_answer([1]), times=3))
    assert found == [(200, b"[1]")] * 3
    assert server.num_connections == 1


@pytest.mark.parametrize(
    ("page", "content"),
    [
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n", b"abc"),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nab", b"ab"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", b""),
    ],
)
def test_bodies_in_every_form(page: bytes, content: bytes) -> None:
    found, server = asyncio.run(fetch(page, times=2))
    assert found == [(200, content)] * 2
    assert server.num_connections == 1


def test_a_server_that_closes_gets_a_new_connection() -> None:
    found, server = asyncio.run(fetch(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 1\r\n\r\na", times=2))
    assert found == [(200, b"a")] * 2
    assert server.num_connections == 2


@pytest.mark.parametrize(
    "page",
    [b"SSH-2.0-x\r\n\r\n", b"HTTP/1.1 banana\r\n\r\n", b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n"],
)
def test_what_is_no_http_is_told(page: bytes) -> None:
    assert problem_of(page) == MALFORMED


async def _cut_after(data: bytes) -> bytes:
    """Content that a client gets from a server that closes its connection after `data`."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(data)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    client = HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", {}, SystemClock())
    try:
        return (await client.get("/", 5.0)).content
    finally:
        await client.close()
        server.close()
        await server.wait_closed()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nx: y\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nhalf\r\n",
    ],
)
def test_a_cut_answer_is_never_whole(data: bytes) -> None:
    with pytest.raises(ExchangeError) as caught:
        asyncio.run(_cut_after(data))
    assert caught.value.kind == CUT


def test_a_body_without_a_length_ends_with_its_connection() -> None:
    assert asyncio.run(_cut_after(b"HTTP/1.1 200 OK\r\n\r\nall of it")) == b"all of it"


def test_nobody_there() -> None:
    async def run() -> None:
        async with scripted_server() as server:
            url = server.url
        client = HttpClient(url, {}, SystemClock())
        with pytest.raises(ExchangeError) as caught:
            await client.get("/", 5.0)
        assert caught.value.kind == CONNECT

    asyncio.run(run())


def test_silence_ends_after_its_time_and_its_connection_is_not_used_again() -> None:
    async def silent(body: dict[str, Any], speaker: Speaker) -> None:
        await asyncio.Event().wait()

    async def run() -> None:
        async with scripted_server(silent, {"/x": json_answer([1])}) as server:
            client = HttpClient(server.url, {}, SystemClock())
            receiver = await client.get("/x", 5.0)
            with pytest.raises(ExchangeError) as caught:
                await client.exchange("POST", "/", b"{}", receiver, 0.05)
            assert caught.value.kind == TIMEOUT
            assert (await client.get("/x", 5.0)).content == b"[1]"
            assert server.num_connections == 2
            await client.close()

    asyncio.run(run())


def test_leaving_early_closes_the_connection_so_that_the_server_can_stop() -> None:
    async def run() -> None:
        left = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(ConnectionError):  # NOTE: a busy client may leave before it has asked
                await reader.read()
            left.set()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        client = HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", {}, SystemClock())
        with pytest.raises(ExchangeError):
            await client.get("/", 0.5)
        await asyncio.wait_for(left.wait(), 5)
        await client.close()
        server.close()
        await server.wait_closed()

    asyncio.run(run())


def test_an_error_of_ours_in_a_receiver_is_not_blamed_on_the_server() -> None:
    class Broken:
        def head(self, status: int, headers: dict[bytes, bytes]) -> None: ...

        def body(self, chunk: bytes) -> None:
            raise KeyError("a bug")

    async def run() -> None:
        async with scripted_server(pages={"/x": json_answer([1])}) as server:
            client = HttpClient(server.url, {}, SystemClock())
            with pytest.raises(KeyError, match="a bug"):
                await client.exchange("GET", "/x", b"", Broken(), 5.0)
            await client.close()

    asyncio.run(run())


def test_a_path_of_the_url_goes_before_every_other() -> None:
    async def run() -> None:
        async with scripted_server(pages={"/team/x": json_answer([1])}) as server:
            client = HttpClient(f"{server.url}/team/", {"x-y": "z"}, SystemClock())
            assert (await client.get("/x", 5.0)).status == 200
            assert f"host: 127.0.0.1:{server.port}\r\nx-y: z\r\n" in server.heads[0]
            await client.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    "url",
    [
        *("", "host:8000", "ftp://host", "http://", "http://a b", "http://u:p@host", "http://h:x"),
        *("http://[::1", "http://h:99999", "http://a..b", f"http://{'a' * 64}:80"),
    ],
)
def test_an_address_of_another_kind_is_refused(url: str) -> None:
    with pytest.raises(ConfigurationError, match="is no HTTP address"):
        HttpClient(url, {}, SystemClock())


def test_an_address_that_is_refused_is_told_without_its_password() -> None:
    with pytest.raises(ConfigurationError, match="url='https://host' is no HTTP address") as refused:
        HttpClient("https://me:hush@host", {}, SystemClock())
    assert "hush" not in str(refused.value)


def test_a_header_cannot_bring_another() -> None:
    with pytest.raises(ConfigurationError, match="authorization"):
        HttpClient("http://host", {"authorization": "Bearer x\r\nhost: y"}, SystemClock())
