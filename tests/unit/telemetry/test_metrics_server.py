import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter

from tandem.core.errors import ConfigurationError
from tandem.telemetry.metrics_server import MetricsServer, serve_metrics

HOST = "127.0.0.1"


def with_server(act: Callable[[MetricsServer], Awaitable[Any]], client_timeout_s: float = 5.0) -> Any:
    """Result of `act` with a server that has one counter at 7 and answers 503 to /health."""

    async def main() -> Any:
        registry = CollectorRegistry()
        Counter("tandem_things", "things", registry=registry).inc(7)
        server = await serve_metrics(
            registry, HOST, 0, lambda: (503, {"state": "draining"}), client_timeout_s=client_timeout_s
        )
        try:
            return await act(server)
        finally:
            await server.close()

    return asyncio.run(asyncio.wait_for(main(), 30))


async def exchange(server: MetricsServer, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(HOST, server.port)
    try:
        writer.write(request)
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)


def answer(request: bytes) -> tuple[bytes, bytes]:
    head, _, body = with_server(lambda server: exchange(server, request)).partition(b"\r\n\r\n")
    return head, body


def test_metrics_are_prometheus_text() -> None:
    head, body = answer(b"GET /metrics?x=1 HTTP/1.1\r\nHost: x\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK")
    assert b"text/plain; version=0.0.4" in head
    assert f"Content-Length: {len(body)}".encode() in head
    assert b"tandem_things_total 7.0" in body


def test_health_is_what_the_process_says() -> None:
    head, body = answer(b"GET /health HTTP/1.0\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ")
    assert json.loads(body) == {"state": "draining"}


def test_a_process_that_drains_is_alive() -> None:
    """Or Kubernetes would restart it for draining."""
    head, body = answer(b"GET /live HTTP/1.1\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert json.loads(body) == {"status": "alive"}


def test_head_has_no_body() -> None:
    head, body = answer(b"HEAD /metrics HTTP/1.1\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert body == b""


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /secret HTTP/1.1\r\n\r\n", b"404"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", b"405"),
        (b"\x16\x03\x01\x02\x00\r\n\r\n", b"400"),
        (b"GET /metrics\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nX: " + b"a" * 100_000 + b"\r\n\r\n", b"431"),
    ],
)
def test_garbage_gets_a_status(request_bytes: bytes, status: bytes) -> None:
    head, _ = answer(request_bytes)
    assert head.split(b" ")[1] == status


def test_an_endless_head_is_cut_off() -> None:
    async def act(server: MetricsServer) -> bytes:
        reader, writer = await asyncio.open_connection(HOST, server.port)
        try:
            for _ in range(1000):
                writer.write(b"a" * 1000)
                await writer.drain()
            return await reader.read()
        except ConnectionError:
            return b"cut"
        finally:
            writer.transport.abort()

    said = with_server(act)
    assert said == b"cut" or b" 431 " in said


def test_a_client_that_goes_away_leaves_the_server_well() -> None:
    async def act(server: MetricsServer) -> bytes:
        for sent in (b"", b"GET /met"):
            _, writer = await asyncio.open_connection(HOST, server.port)
            writer.write(sent)
            writer.transport.abort()
        return await exchange(server, b"GET /metrics HTTP/1.1\r\n\r\n")

    assert b"200 OK" in with_server(act)


def test_a_silent_client_is_dropped() -> None:
    async def act(server: MetricsServer) -> bytes:
        return await exchange(server, b"GET /metrics HTTP/1.1\r\n")

    assert with_server(act, client_timeout_s=0.1) == b""


def test_silent_clients_keep_nobody_out() -> None:
    """64 of them had every further connection refused, so that a probe of liveness failed and the worker was killed."""

    async def act(server: MetricsServer) -> bytes:
        silent = [await asyncio.open_connection(HOST, server.port) for _ in range(64)]
        try:
            said = await exchange(server, b"GET /live HTTP/1.1\r\n\r\n")
            assert await silent[0][0].read() == b"", "the oldest made room"
            assert not any(reader.at_eof() for reader, _ in silent[1:])
            return said
        finally:
            for _, writer in silent:
                writer.transport.abort()

    assert b" 200 " in with_server(act, client_timeout_s=1000.0)


def test_closing_drops_who_is_connected_without_a_word() -> None:
    async def act(server: MetricsServer) -> bytes:
        complaints: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        reader, writer = await asyncio.open_connection(HOST, server.port)
        await exchange(server, b"GET /metrics HTTP/1.1\r\n\r\n")  # the first connection has been accepted before
        await server.close()
        try:
            said = await reader.read()
        except ConnectionError:
            said = b""
        finally:
            writer.transport.abort()
        assert complaints == []
        return said

    assert with_server(act, client_timeout_s=1000.0) == b""


def test_a_port_that_is_taken_is_refused_by_name() -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"{HOST}:{port}.*--metrics-port"):
            asyncio.run(serve_metrics(CollectorRegistry(), HOST, port, lambda: (200, {})))
