"""Serves one request that generates text, over ASGI: reads and parses its body, serves it, and sends the answer.

The answer is sent as events of a stream or as one body. Invariant: an error before the first byte has an HTTP status, a
later one is sent as an error event; a client that disconnects cancels all work for it at once; no answer ends early
without an error.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tandem.core.errors import TandemError
from tandem.core.machine import wall_s
from tandem.core.pins import Pin
from tandem.gateway.accounts import caller_of
from tandem.gateway.accounts_headers import problem_for, refusal_headers
from tandem.gateway.body import Body, ClientLeftError, wait_until_left
from tandem.gateway.dialect import Dialect, ParsedRequest
from tandem.gateway.edge import header_of, request_id_of
from tandem.gateway.errors import Problem
from tandem.gateway.gateway import Gateway
from tandem.gateway.history import RequestRecord
from tandem.gateway.http_protocol import give_up_unread, ping_half_closed
from tandem.gateway.pace import StreamPacer
from tandem.gateway.pin_book import PromptPins
from tandem.gateway.server_timing import server_timing
from tandem.gateway.serving import ServeStream
from tandem.gateway.update_filter import UpdateFilter
from tandem.telemetry.gen_ai import request_attributes, response_attributes
from tandem.telemetry.tracing import Span

JSON = "application/json"
PING_S = 15.0  # of silence; proxies give up a stream after a minute, clients after three
_STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}

_logger = logging.getLogger(__name__)


class EndpointResponse(Response):
    """Response of an endpoint: when called, it reads the body and serves the request. `body`: the body, if it was read
    before.

    NOTE: a `Response`, because the web framework passes the connection to nothing else.
    """

    def __init__(self, gateway: Gateway, dialect: Dialect, body: Body | None = None) -> None:
        super().__init__()
        self._gateway = gateway
        self._dialect = dialect
        self._given = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = _Exchange(self._gateway, self._dialect, scope, send)
        try:
            body = self._given or await self._gateway.bodies.read(receive, scope)
        except ClientLeftError:
            return
        except TandemError as error:
            await exchange.refuse(error)
            return
        with body:
            await self._serve(exchange, body, scope, receive)

    async def _serve(self, exchange: "_Exchange", body: Body, scope: Scope, receive: Receive) -> None:
        """Runs until the answer is sent or the client has disconnected."""
        name = f"POST {scope['path']}"
        work = asyncio.create_task(exchange.serve(body, name, header_of(scope, b"traceparent")), name="exchange")
        gone = asyncio.create_task(wait_until_left(receive), name="disconnect")
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if exchange.has_ended:  # NOTE: the end of a response, too, is reported as the client's leaving
                await asyncio.wait((work,))
            elif not work.done():
                self._gateway.metrics.disconnects.inc()
        finally:
            work.cancel()
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
        if not work.cancelled():
            work.result()


class _Exchange:
    """One request and its response, from the body to the last byte."""

    def __init__(self, gateway: Gateway, dialect: Dialect, scope: Scope, send: Send) -> None:
        self._gateway = gateway
        self._dialect = dialect
        self._is_anthropic = dialect.kind == "messages"
        self._scope = scope
        self._caller = caller_of(scope)
        self._request_id = request_id_of(scope)
        self._bill = self._caller.bill(self._request_id)
        self._send = send
        self._has_arrived = False
        self._has_begun = False
        self.has_ended = False
        self._asked: ParsedRequest | None = None
        self._pins: PromptPins | None = None
        self._noted: Sequence[Pin] | None = None  # granted pins that were recorded
        self._record: RequestRecord | None = None
        self._span = Span(None)
        self._said_s = 0.0
        self._pings: asyncio.Task[None] | None = None

    async def serve(self, body: Body, name: str, traceparent: str | None) -> None:
        """Answers the request. Raises only when cancelled; unexpected exceptions are logged and reported."""
        with self._gateway.tracing.span(name, traceparent) as self._span:
            try:
                async with asyncio.timeout(self._gateway.request_timeout_s):
                    with self._gateway.admission.place() as free:
                        await self._serve(body, free)
            except (TandemError, TimeoutError) as error:
                self._close("error", str(error) or "timeout", problem_for(error).message)
                await self.refuse(error)
            except asyncio.CancelledError:
                self._close("abort", "the client left", "the client left")
                raise
            except Exception as error:  # the edge of a request: its client must be told, and the log
                self._close("error", f"{type(error).__name__}: {error}", problem_for(error).message)
                _logger.exception("request %s failed by a bug", self._request_id)
                await self.refuse(error)
            finally:
                self._stop_pings()

    async def refuse(self, error: BaseException) -> None:
        """Reports an error: as an HTTP status before the response has begun, else as an error event.

        NOTE: does nothing once the answer was sent, as when the time is up while a worker's stream is being closed.
        """
        if self.has_ended:
            return
        problem = problem_for(error)
        self._gateway.metrics.rejected(problem.code, problem.status, has_arrived=self._has_arrived)
        give_up_unread(self._scope)
        if self._has_begun or problem.status >= 500:  # NOTE: a refused request is no failure of the server's
            self._span.fail(error)
        # NOTE: the head of a whole answer may be held by `send`, and goes with it; if not, the server breaks off
        if self._has_begun and self._asked is not None and self._asked.is_stream:
            await self._send_body(self._asked.writer.failed(problem), is_last=True)
        else:
            status, body = self._dialect.problem(problem, self._request_id)
            more = refusal_headers(error, is_anthropic=self._is_anthropic)
            await self._send_head(status, {"content-type": JSON, **problem.headers, **more})
            await self._send_body(body, is_last=True)
        _log_problem(self._request_id, problem, error)

    async def _serve(self, body: Body, free: Callable[[], None]) -> None:
        """Parses the body and sends the answer; `free` ends the request's place within the concurrency limit.

        NOTE: `free` is called before the last byte is sent, because the client may then send its next request.
        """
        gateway = self._gateway
        record = self._record = gateway.history.open(self._request_id, gateway.model.name, wall_s())
        record.kind, record.tenant = self._dialect.kind, self._caller.tenant
        with record.timed("tokenise") as attributes, body:  # NOTE: which is not held for as long as the answer takes
            asked = await self._dialect.read(body.data, self._request_id, self._caller.isolate)
            if asked.encoding is not None:
                attributes |= asked.encoding.attributes
                gateway.metrics.observe_encoding(asked.encoding)
        asked = self._asked = replace(asked, request=self._caller.isolated(asked.request))
        if asked.answer_id is not None:
            gateway.history.name(record, asked.answer_id)
        record.num_choices = len(asked.request.choices)
        self._span.set(request_attributes(self._dialect.kind, asked.request.model, asked.request.choices[0].params))
        update_filter = UpdateFilter(asked.results, gateway.moderator)
        if not await gateway.passes_moderation(asked.request):
            await self._stop(asked, update_filter)
            return
        self._pins = await gateway.find_pins(asked)
        await self._reserve(asked)
        async with gateway.open(asked.request, record) as stream:
            self._has_arrived = True
            if asked.is_stream:
                gateway.metrics.open_streams.inc()
                try:
                    await self._stream(stream, update_filter, asked, record)
                finally:
                    gateway.metrics.open_streams.dec()
            else:
                await self._whole(stream, update_filter, asked)
            if update_filter.was_stopped:
                record.close("filtered")
            await self._bill.settle()
            free()
            await self._end(asked, record)
        self._finish_span(asked, record)

    async def _stream(
        self, stream: ServeStream, update_filter: UpdateFilter, asked: ParsedRequest, record: RequestRecord
    ) -> None:
        """NOTE: the response's headers wait for the first update, so that any failure before it has an HTTP status."""
        pace = StreamPacer(self._gateway.clock)
        while not update_filter.is_over and (batch := await stream.next_updates(pace)):
            updates = await update_filter.apply(batch)
            await self._note_pins(asked)
            if not self._has_begun:
                ping_half_closed(self._scope, self._dialect.ping)
                await self._send_head(200, _STREAM_HEADERS | {"server-timing": server_timing(record.stages())})
            if frames := asked.writer.chunk(updates):
                await self._send_body(frames, is_last=False)
            if self._pings is None:
                self._pings = asyncio.create_task(self._ping(), name="pings")

    async def _ping(self) -> None:
        """Sends pings through pauses (hidden thinking, a failover), so that clients do not take the stream for dead."""
        loop = asyncio.get_running_loop()
        while True:
            # NOTE: until a fixed time; PING_S less a rounded silence may be too short to move the clock
            left_s = self._said_s + PING_S - loop.time()
            if left_s <= 0:
                await self._send_body(self._dialect.ping, is_last=False)
            else:
                await asyncio.sleep(left_s)

    def _stop_pings(self) -> None:
        if self._pings is not None:
            self._pings.cancel()

    async def _whole(self, stream: ServeStream, update_filter: UpdateFilter, asked: ParsedRequest) -> None:
        while not update_filter.is_over and (batch := await stream.next_updates()):
            await update_filter.apply(batch)
            await self._note_pins(asked)

    async def _note_pins(self, asked: ParsedRequest) -> None:
        """Records the granted pins once a worker has reported them, even if the request fails later.

        NOTE: a worker that continues the request may grant others.
        """
        granted = asked.results[0].granted
        if self._pins is not None and granted is not None and granted != self._noted:
            self._noted = granted
            await self._gateway.keep_pins(self._pins, asked)

    async def _end(self, asked: ParsedRequest, record: RequestRecord) -> None:
        """Sends the last events of a stream, or the whole body."""
        if asked.is_stream:
            await self._send_body(asked.writer.end(), is_last=True)
            return
        body = asked.writer.whole()
        timing = server_timing(record.stages())
        await self._send_head(200, {"content-type": JSON, "content-length": str(len(body)), "server-timing": timing})
        await self._send_body(body, is_last=True)

    async def _stop(self, asked: ParsedRequest, update_filter: UpdateFilter) -> None:
        """Answers a prompt that moderation rejected: every choice is ended before anything was generated."""
        updates = update_filter.stop()
        assert self._record is not None
        self._record.close("filtered")
        if asked.is_stream:
            await self._send_head(200, _STREAM_HEADERS)
            await self._send_body(asked.writer.chunk(updates), is_last=False)
        await self._end(asked, self._record)

    async def _send_head(self, status: int, headers: Mapping[str, str]) -> None:
        self._has_begun = True
        self._said_s = asyncio.get_running_loop().time()
        self._span.set({"http.response.status_code": status})
        headers = {**headers, **self._bill.headers}
        encoded = [(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": encoded})

    async def _send_body(self, body: bytes, *, is_last: bool) -> None:
        if is_last:
            self._stop_pings()
        await self._send({"type": "http.response.body", "body": body, "more_body": not is_last})
        self._said_s = asyncio.get_running_loop().time()
        self.has_ended |= is_last

    async def _reserve(self, asked: ParsedRequest) -> None:
        info = self._gateway.model_info.known
        max_model_len = None if info is None else info.max_model_len
        await self._bill.reserve(
            asked, max_model_len, is_anthropic=self._is_anthropic, was_heard=lambda: self._has_begun
        )

    def _close(self, state: str, error: str, problem: str) -> None:
        if self._record is not None:
            self._bill.close(self._record.ends, is_abort=state == "abort", was_heard=self._has_begun)
            self._record.close(state, error, problem)
            self._gateway.tracing.export_stages(self._record.stages(), self._span.traceparent)

    def _finish_span(self, asked: ParsedRequest, record: RequestRecord) -> None:
        reasons = [str(result.finish_reason) for result in asked.results]
        num_prompt = sum(result.num_prompt_tokens for result in asked.results)
        num_output = sum(result.num_output_tokens for result in asked.results)
        num_cached = sum(result.num_cached_tokens for result in asked.results)
        self._span.set(response_attributes(self._request_id, reasons, num_prompt, num_output, num_cached))
        self._gateway.tracing.export_stages(record.stages(), self._span.traceparent)


def _log_problem(request_id: str, problem: Problem, error: BaseException) -> None:
    """Logs the error's own message, which may say more than the client is told."""
    level = logging.WARNING if problem.status >= 500 else logging.INFO
    why = str(error) if isinstance(error, TandemError) else problem.message
    _logger.log(level, "request %s is refused with %d: %s", request_id, problem.status, why)
