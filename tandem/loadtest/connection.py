"""One HTTP/1.1 connection of the load client, driven by callbacks, so that tokens are timed as their bytes are read.

Invariant: at most one exchange at a time; its future completes once, however it ends. Knows no URL and no JSON.
"""

import asyncio
from typing import Protocol, cast

import httptools

from tandem.loadtest.failure import CUT, MALFORMED, ExchangeError


class ResponseReceiver(Protocol):
    """Receives an answer while it arrives: `head` once, then `body` for each piece. Either may raise, which ends the
    exchange.
    """

    def head(self, status: int, headers: dict[bytes, bytes]) -> None: ...

    def body(self, chunk: bytes) -> None: ...


class HttpConnection(asyncio.Protocol):
    """A connection and its current exchange."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._receiver: ResponseReceiver | None = None
        self._done: asyncio.Future[None] | None = None
        self._status = 0
        self._headers: dict[bytes, bytes] = {}
        self._has_head = False
        self._has_length = False
        self.is_open = False

    async def exchange(self, request: bytes, receiver: ResponseReceiver) -> None:
        """Sends a request and passes its answer to `receiver`.

        Raises:
            ExchangeError: the connection ended first, or the answer is no HTTP; or what the receiver raises.
        """
        assert self._transport is not None
        assert self._done is None, "an exchange is under way"
        self._receiver, self._headers, self._has_head = receiver, {}, False
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()
        is_whole = False
        try:
            if not self.is_open:
                raise ExchangeError(CUT, "the connection was closed before the request was sent")
            self._transport.write(request)
            await self._done
            is_whole = True
        finally:
            if not is_whole:
                self.close()
            self._done = self._receiver = None

    def close(self) -> None:
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        if self._done is None or self._done.done():
            self.close()  # NOTE: bytes without a request; they would be taken for the next answer
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:  # what the receiver has raised
            self._fail(error.__context__ if isinstance(error.__context__, Exception) else error)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(ExchangeError(MALFORMED, f"no HTTP: {error}"))

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        if self._has_head and not self._has_length and error is None:
            self._succeed()  # NOTE: a body without a length ends with its connection
        self._fail(ExchangeError(CUT, str(error) if error else "the server closed the connection"))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()
        self._has_length = b"content-length" in self._headers or b"transfer-encoding" in self._headers
        if self._status >= 200 and self._receiver is not None:
            self._has_head = True
            self._receiver.head(self._status, self._headers)

    def on_body(self, body: bytes) -> None:
        if self._receiver is not None:
            self._receiver.body(body)

    def on_message_complete(self) -> None:
        if self._status < 200:
            return
        if not self._parser.should_keep_alive():
            self.close()
        self._succeed()

    def _succeed(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    def _fail(self, error: Exception) -> None:
        self.close()
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)
