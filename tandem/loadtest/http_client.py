"""HTTP client with microseconds of overhead a token: one host, persistent connections, no redirects, no retries.

Invariant: a connection is reused only after an answer that ended properly. Requests never wait for a connection: a new
one is opened if none is free.
"""

import asyncio
import ssl
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from tandem.core.addresses import check_host
from tandem.core.clock import Clock
from tandem.core.errors import ConfigurationError, shown, without_password
from tandem.loadtest.connection import HttpConnection, ResponseReceiver
from tandem.loadtest.failure import CONNECT, MALFORMED, TIMEOUT, ExchangeError

_DEFAULT_PORTS = {"http": 80, "https": 443}
_MAX_IDLE_S = 20.0  # NOTE: servers close idle connections after a minute or so; a request must not meet that
_MAX_BODY_BYTES = 64 << 20


@dataclass(slots=True)
class WholeAnswer:
    """A `ResponseReceiver` that keeps the whole body."""

    status: int = 0
    content: bytes = b""

    def head(self, status: int, headers: dict[bytes, bytes]) -> None:
        self.status = status

    def body(self, chunk: bytes) -> None:
        self.content += chunk
        if len(self.content) > _MAX_BODY_BYTES:
            raise ExchangeError(MALFORMED, f"the answer is longer than {_MAX_BODY_BYTES} bytes")


class HttpClient:
    """Client of one server. For one event loop.

    Args:
        url: such as http://host:port; a path in it is prepended to every other.
        headers: of every request.

    Raises:
        ConfigurationError: the URL or a header is invalid.
    """

    def __init__(self, url: str, headers: Mapping[str, str], clock: Clock) -> None:
        self._host, self._port, self._prefix, scheme = _parts(url)
        self._ssl = ssl.create_default_context() if scheme == "https" else None
        self._clock = clock
        self._idle: deque[tuple[float, HttpConnection]] = deque()
        self._open: set[HttpConnection] = set()
        name = f"[{self._host}]" if ":" in self._host else self._host
        fields = {"host": name if self._port == _DEFAULT_PORTS[scheme] else f"{name}:{self._port}", **headers}
        self._headers = _header_lines(fields)

    async def get(self, path: str, timeout_s: float) -> WholeAnswer:
        """Sends a GET request. Raises ExchangeError: no complete answer in time."""
        answer = WholeAnswer()
        await self.exchange("GET", path, b"", answer, timeout_s)
        return answer

    async def exchange(self, method: str, path: str, body: bytes, receiver: ResponseReceiver, timeout_s: float) -> None:
        """Sends a request and passes its answer to `receiver`; cancellation closes its connection.

        Raises:
            ExchangeError: no complete answer in time; also any exception of the receiver.
        """
        try:
            async with asyncio.timeout(timeout_s):
                connection = self._free_connection() or await self._connect()
                self._open.add(connection)
                try:
                    await connection.exchange(self._request(method, path, body), receiver)
                finally:
                    self._open.discard(connection)
                if connection.is_open:
                    self._idle.append((self._clock.now_s(), connection))
        except TimeoutError as error:
            raise ExchangeError(TIMEOUT, f"no whole answer within {timeout_s:g} s") from error

    async def close(self) -> None:
        """Close every connection."""
        for connection in (*self._open, *(connection for _, connection in self._idle)):
            connection.close()
        self._idle.clear()
        await asyncio.sleep(0)  # NOTE: an aborted transport closes its socket in the next turn of the loop

    def _free_connection(self) -> HttpConnection | None:
        """The idle connection used last, if any; closes those that were idle for long."""
        while self._idle and self._idle[0][0] < self._clock.now_s() - _MAX_IDLE_S:
            self._idle.popleft()[1].close()
        while self._idle:
            _, connection = self._idle.pop()
            if connection.is_open:
                return connection
        return None

    async def _connect(self) -> HttpConnection:
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(HttpConnection, self._host, self._port, ssl=self._ssl)
        except OSError as error:
            raise ExchangeError(CONNECT, f"{self._host}:{self._port}: {error}") from error
        return connection

    def _request(self, method: str, path: str, body: bytes) -> bytes:
        length = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n" if method != "GET" else ""
        return f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._headers}{length}\r\n".encode("latin-1") + body


def _parts(url: str) -> tuple[str, int, str, str]:
    """Host, port, path and scheme."""
    try:
        parts = urlsplit(url)
        scheme, host, port = parts.scheme, parts.hostname, parts.port
        check_host(host or "")
    except ValueError:
        scheme, host, port = "", None, None
    if scheme not in _DEFAULT_PORTS or not host or not url.isascii() or any(map(str.isspace, url)) or "@" in url:
        raise ConfigurationError(
            f"url={shown(without_password(url))} is no HTTP address; use one as http://127.0.0.1:8000"
        )
    return host, port or _DEFAULT_PORTS[scheme], urlsplit(url).path.rstrip("/"), scheme


def _header_lines(headers: Mapping[str, str]) -> str:
    for name, value in headers.items():
        if not value.isascii() or not value.isprintable():
            raise ConfigurationError(f"the {name} header may hold printable ASCII only; look for a stray line end")
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items())
