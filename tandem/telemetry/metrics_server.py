"""Small HTTP server for one process's metrics and health; it owns its connections but not the data it serves.

Invariant: a client costs at most one bounded buffer for a few seconds, whatever it sends, and does not block others.
Every answer closes its connection. It must never serve users' requests.
"""

import asyncio
import contextlib
import json
from collections.abc import Callable
from http import HTTPStatus

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from tandem.core.errors import ConfigurationError

Health = Callable[[], tuple[int, dict[str, object]]]

_MAX_HEAD_BYTES = 16 << 10
_MAX_CONNECTIONS = 64
_CLIENT_TIMEOUT_S = 5.0
_JSON = "application/json"


class MetricsServer:
    """Answers GET /metrics (Prometheus text), /health and /live (JSON). Made by `serve_metrics`.

    /health tells whether requests should be sent here. /live is 200 while the process can answer at all, also while it
    starts or drains, since restarting a draining process would lose its streams.
    """

    def __init__(self, registry: CollectorRegistry, health: Health, client_timeout_s: float) -> None:
        self._registry = registry
        self._health = health
        self._client_timeout_s = client_timeout_s
        self._connections: dict[asyncio.Task[None], None] = {}  # the oldest first
        self._server: asyncio.Server | None = None
        self.port = 0

    async def start(self, host: str, port: int) -> None:
        try:
            self._server = await asyncio.start_server(self._serve, host, port, limit=_MAX_HEAD_BYTES)
        except (OSError, OverflowError) as error:
            raise ConfigurationError(
                f"metrics cannot be served at {host}:{port}: {error}; choose another --metrics-port, 0 for a free one"
            ) from error
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Stop listening and close all connections."""
        if self._server is not None:
            self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        if self._server is not None:
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._connections) == _MAX_CONNECTIONS:
            oldest = next(iter(self._connections))  # NOTE: requests are answered at once, so this connection is idle
            del self._connections[oldest]
            oldest.cancel()
        self._connections[task] = None
        try:
            # NOTE: a handler that ends as cancelled is logged as an error by asyncio before 3.12
            with contextlib.suppress(TimeoutError, OSError, asyncio.CancelledError):
                async with asyncio.timeout(self._client_timeout_s):
                    writer.write(await self._answer(reader))
                    await writer.drain()
                    writer.close()
                    await writer.wait_closed()
        finally:
            self._connections.pop(task, None)
            writer.transport.abort()  # NOTE: after an orderly close this does nothing

    async def _answer(self, reader: asyncio.StreamReader) -> bytes:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            return _response(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, _JSON, b"{}")
        except asyncio.IncompleteReadError:
            return b""
        words = head.split(b"\r\n", 1)[0].split(b" ")
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            return _response(HTTPStatus.BAD_REQUEST, _JSON, b"{}")
        if words[0] not in (b"GET", b"HEAD"):
            return _response(HTTPStatus.METHOD_NOT_ALLOWED, _JSON, b"{}")
        return self._page(words[1].split(b"?", 1)[0], with_body=words[0] == b"GET")

    def _page(self, path: bytes, with_body: bool) -> bytes:
        if path == b"/metrics":
            return _response(HTTPStatus.OK, CONTENT_TYPE_PLAIN_0_0_4, generate_latest(self._registry), with_body)
        if path == b"/health":
            status, body = self._health()
            return _response(HTTPStatus(status), _JSON, json.dumps(body).encode(), with_body)
        if path == b"/live":
            return _response(HTTPStatus.OK, _JSON, b'{"status": "alive"}', with_body)
        return _response(HTTPStatus.NOT_FOUND, _JSON, b'{"error": "there are /metrics, /health and /live"}', with_body)


async def serve_metrics(
    registry: CollectorRegistry, host: str, port: int, health: Health, *, client_timeout_s: float = _CLIENT_TIMEOUT_S
) -> MetricsServer:
    """Serves `registry` until the returned server is closed; `port` 0 takes a free one.

    Args:
        health: called in the event loop for each /health; returns the HTTP status and the body. Must not block.
        client_timeout_s: time for a client to send its request and receive the answer.

    Raises:
        ConfigurationError: the address cannot be listened at.
    """
    server = MetricsServer(registry, health, client_timeout_s)
    await server.start(host, port)
    return server


def _response(status: HTTPStatus, content_type: str, body: bytes, with_body: bool = True) -> bytes:
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {content_type}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + (body if with_body else b"")
