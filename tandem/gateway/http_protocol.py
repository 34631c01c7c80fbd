"""Uvicorn's HTTP protocol with limits on the head (request line and headers), which no API key protects yet.

Invariant: a connection buffers at most the limit plus one read of header bytes, trailers and chunk extensions included.
Closed are connections whose head does not end in time, whose body goes on after its answer was sent, or whose client
does not read the end of a failed request. Connections beyond `max_connections` are answered 503 and closed. Offers to
change the protocol are ignored (RFC 9110 §7.8). HTTP/1.0 gets no chunks. A client that ends its sending (half-close)
still gets its answer if it reads.
"""

import asyncio
import sys
from typing import Any

import httptools
from starlette.types import Scope
from uvicorn._types import ASGI3Application, ASGIReceiveCallable, ASGISendCallable, ASGISendEvent
from uvicorn._types import Scope as ServerScope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from tandem.gateway.body import BODY_TIMEOUT_S
from tandem.gateway.errors import Problem
from tandem.gateway.half_close import HalfCloseProbe
from tandem.gateway.openai.frames import error_body

MAX_HEAD_BYTES = 64 * 1024  # of one request
HEAD_TIMEOUT_S = 10.0  # from a head's first byte, or from connecting, to its end
LAST_WORDS_S = 1.0  # time for a client to read how its request ended
UNREAD_S = 10.0  # time in which a client must read some of the bytes that are left for it
_MAX_ROUNDS = 6  # of `UNREAD_S` that a client has in all
_GIVE_UP_KEY = "tandem.give_up_unread"
_PING_KEY = "tandem.ping_half_closed"


def give_up_unread(scope: Scope) -> None:
    """Call before a request's last bytes: the connection is aborted if the client then reads nothing for UNREAD_S."""
    if (give_up := scope.get(_GIVE_UP_KEY)) is not None:
        give_up()


def ping_half_closed(scope: Scope, ping: bytes) -> None:
    """Call when a stream begins that may send `ping` between its events: probes half-closed clients with it."""
    if (use := scope.get(_PING_KEY)) is not None:
        use(ping)


def without_connection(scope: Scope) -> Scope:
    """Returns `scope` without its connection's callbacks, for work that outlives the connection."""
    return {name: value for name, value in scope.items() if name not in (_GIVE_UP_KEY, _PING_KEY)}


class _HeadTooLongError(Exception):
    """Stops the parser of a connection whose head is too long."""


class LimitedHttpProtocol(HttpToolsProtocol):
    """One HTTP/1.x connection.

    Args:
        max_connections: of this server, this one included; None = any number.
    """

    def __init__(self, *args: Any, max_connections: int | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self._max_connections = max_connections
        self._num_head_bytes = 0  # of this request's line, headers and trailers
        self._num_waiting_bytes = 0  # read since the parser last passed something on
        self._is_in_body = False
        self._timer: asyncio.TimerHandle | None = None  # ends the connection
        self._served: RequestResponseCycle | None = None  # NOTE: of several requests on their way, `cycle` is the last
        self._ping: bytes | None = None
        self._probe: HalfCloseProbe | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._max_connections is not None and len(self.connections) > self._max_connections:
            message = f"this gateway has {self._max_connections} connections, which is all it keeps; try again later"
            self._end_with(Problem(503, "service_unavailable_error", "too_many_connections", message, retry_after_s=1))
        else:
            self._start_timer(HEAD_TIMEOUT_S)

    def data_received(self, data: bytes) -> None:
        if self._timer is None and not self._is_in_body and self._is_answered():
            self._start_timer(HEAD_TIMEOUT_S)  # NOTE: empty lines before a head are no beginning to the parser
        self._num_waiting_bytes += len(data)
        self._parse(data)
        if self._is_too_long() and not self.transport.is_closing():
            self._refuse()

    def _parse(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        while data:
            try:
                self.parser.feed_data(data)
                data = b""
            except httptools.HttpParserUpgrade as upgrade:
                data = self._head_without_upgrade() + data[upgrade.args[0] :] if self._is_upgrading() else b""
            except httptools.HttpParserError:
                self.send_400_response("Invalid HTTP request received.")
                data = b""

    def _is_upgrading(self) -> bool:
        """Whether the parser would stop after this head to change the protocol, other than for CONNECT."""
        return bool(self.parser.should_upgrade()) and self.parser.get_method() != b"CONNECT"

    def _head_without_upgrade(self) -> bytes:
        """The head without its upgrade, for a new parser: httptools skips the body after an upgrade offer."""
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        lines += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return b"\r\n".join([*lines, b"", b""])

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)
        if self._served is not None and not self._served.response_complete:
            self._served.disconnected = True
            self._served.message_event.set()

    def eof_received(self) -> bool:  # type: ignore[override]
        """NOTE: HTTP/1.0 has no interim responses to probe with, so a client that ends its sending counts as gone."""
        if self._is_answered() or self.cycle.more_body or self.cycle.scope["http_version"] == "1.0":
            return False
        if self.transport.get_write_buffer_size():
            self.transport.abort()  # NOTE: closing would wait until the client has read what is here
            return False
        self.cycle.keep_alive = False
        assert self._served is not None
        self._start_probe(self._served)
        return True

    def _start_probe(self, cycle: RequestResponseCycle) -> None:
        self._probe = HalfCloseProbe(self.loop, self.transport, cycle, self._ping)
        self._probe.write()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._probe is not None and not self._is_answered():
            self._give_up_unread()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_head_bytes = self._num_waiting_bytes = 0
        self.scope[_GIVE_UP_KEY] = self._give_up_unread  # type: ignore[literal-required]
        self.scope[_PING_KEY] = self._use_ping  # type: ignore[literal-required]
        self._start_timer(HEAD_TIMEOUT_S)

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._count(len(name) + len(value))

    def on_headers_complete(self) -> None:
        if self._is_upgrading():
            return
        self._stop_timer()
        self._is_in_body = True
        self._num_waiting_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_waiting_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._is_upgrading():
            return
        self._stop_timer()
        self._is_in_body = False
        self._num_waiting_bytes = 0
        super().on_message_complete()
        if self._is_answered():
            self._start_timer(self.timeout_keep_alive)  # NOTE: uvicorn's own ended with the body's first bytes

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_in_body and self._is_answered():
            self._start_timer(BODY_TIMEOUT_S)

    def send_400_response(self, msg: str) -> None:
        if self._is_too_long():
            self._refuse()
        else:
            super().send_400_response(msg)

    def _count(self, num_bytes: int) -> None:
        """Counts header bytes. Raises _HeadTooLongError, which the parser reports as an error of its own."""
        self._num_head_bytes += num_bytes
        self._num_waiting_bytes = 0
        if self._is_too_long():
            raise _HeadTooLongError

    def _is_too_long(self) -> bool:
        return max(self._num_head_bytes, self._num_waiting_bytes) > MAX_HEAD_BYTES

    def _refuse(self) -> None:
        message = f"the request's line and headers are longer than {MAX_HEAD_BYTES} bytes"
        self._end_with(Problem(431, "invalid_request_error", "headers_too_large", message))

    def _end_with(self, problem: Problem) -> None:
        """Sends this answer on the connection itself, whatever was sent before, and closes it."""
        body = error_body(problem)
        headers = {
            "content-type": "application/json",
            "content-length": len(body),
            **problem.headers,
            "connection": "close",
        }
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self.transport.write(STATUS_LINE[problem.status] + head.encode("ascii") + b"\r\n" + body)
        self.transport.close()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._served, self._ping = cycle, None
        super()._start_asgi_task(cycle, _Unchunked(app, cycle) if cycle.scope["http_version"] == "1.0" else app)
        if self._probe is not None:
            self._start_probe(cycle)

    def _use_ping(self, ping: bytes) -> None:
        self._ping = ping
        if self._probe is not None:
            self._probe.ping = ping

    def _give_up_unread(self) -> None:
        assert self.cycle is not None
        self._watch_unread(self.cycle, _MAX_ROUNDS)

    def _watch_unread(self, cycle: RequestResponseCycle, num_rounds: int) -> None:
        num_left = self.transport.get_write_buffer_size()
        self.loop.call_later(UNREAD_S, self._abort_unread, cycle, num_rounds - 1, num_left)

    def _abort_unread(self, cycle: RequestResponseCycle, num_rounds: int, num_left: int) -> None:
        """NOTE: aborts, because closing would wait until the client has read the buffered bytes."""
        if self.cycle is not cycle or cycle.response_complete or not self.flow.write_paused:
            return
        if num_rounds and self.transport.get_write_buffer_size() < num_left:
            self._watch_unread(cycle, num_rounds)
        else:
            self.transport.abort()

    def _is_answered(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _start_timer(self, delay_s: float) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(delay_s, self._give_up)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        """Closes an idle connection. NOTE: behind an answer being written, the next request may wait unread."""
        if not self._is_answered():
            self._start_timer(HEAD_TIMEOUT_S)
        elif not self.transport.is_closing():
            self.transport.close()


class _Unchunked:
    """Answers HTTP/1.0 clients without chunks: a body of unknown length ends with its connection."""

    def __init__(self, app: ASGI3Application, cycle: RequestResponseCycle) -> None:
        self._app = app
        self._cycle = cycle
        self._is_unbounded = False

    async def __call__(self, scope: ServerScope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        async def plain(message: ASGISendEvent) -> None:
            if message["type"] == "http.response.start":
                names = {name.lower() for name, _ in message.get("headers", ())}
                self._is_unbounded = b"content-length" not in names
                if self._is_unbounded:
                    self._cycle.chunked_encoding = False
            elif self._is_unbounded and message["type"] == "http.response.body":
                is_last = not message.get("more_body", False)
                self._cycle.expected_content_length = len(message.get("body", b"")) if is_last else sys.maxsize
            await send(message)

        await self._app(scope, receive, plain)
