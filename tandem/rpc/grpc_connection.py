"""gRPC connection of a client to one process: sends calls, reads answers, and translates failures.

A connection lasts as long as its client. It replaces its channel (gRPC's object for an address) when needed. A channel
has one session: identities and keys agreed in a handshake. Failures are raised as errors of `core.errors`. A stream
that is closed or cancelled here ends at the other side at once. No call is sent before the server has proved its
identity; every call proves its sender's. Invariant: no call begins on a channel whose certificates were replaced, or on
which a call has timed out although it was connected.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from functools import partial
from typing import TypeVar

import grpc

from tandem.core.errors import InvalidRequestError, TandemError, UntrustedPeerError, WorkerLostError
from tandem.rpc.credentials import Credentials
from tandem.rpc.deadline import Deadline
from tandem.rpc.form import Form
from tandem.rpc.methods import Method
from tandem.rpc.network import MetadataSource
from tandem.rpc.session import Expected
from tandem.rpc.session_channel import SessionChannel
from tandem.rpc.status import Metadata, error_from

FORMER_CERTIFICATES_S = 300.0  # for which running calls may go on after the certificates of their channel are replaced
CHECK_INTERVAL_S = 5.0  # between two checks for new certificates while a call runs
Q = TypeVar("Q")
A = TypeVar("A")


class GrpcConnection:
    """Calls the methods of one address; connects when first used and reconnects when needed.

    Calls on a replaced channel continue on it; on a channel with former certificates for at most
    `FORMER_CERTIFICATES_S`. A call meant for one run of the process names its `incarnation`, the random id of that run
    ("" = any): a restarted process lacks the state that the call refers to, so AnotherIncarnationError is raised.
    `timeout_s` of a call: from its start, handshake included, to its last answer, also of a stream; None = no limit.
    After it, WorkerLostError is raised.

    Args:
        address: host:port.
        credentials: of this process.
        expected: requirements on the process at `address`.
        metadata_source: further headers for each call, such as `traceparent`.
    """

    def __init__(
        self, address: str, credentials: Credentials, expected: Expected, metadata_source: MetadataSource | None
    ) -> None:
        self.address = address
        self.num_calls = 0
        self._may_talk = credentials.may_talk_with(address)
        self._connect = partial(SessionChannel, address, credentials, expected)
        self._channel = self._connect()
        self._num_channels = 1
        self._former: dict[SessionChannel, asyncio.TimerHandle | None] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._metadata_source = metadata_source
        self._is_closed = False
        self._has_certificates = credentials.tls is not None
        self._check_timer: asyncio.TimerHandle | None = None

    async def call(self, method: Method[Q, A], request: Q, timeout_s: float | None) -> A:
        """Unary call: one request, one answer."""
        data = method.request.encode(request)
        with self._running(method, timeout_s) as (channel, deadline):
            self.num_calls += 1
            try:
                return self._read(method.answer, await channel.call(method, data, deadline, self.own_metadata))
            finally:
                self.num_calls -= 1

    async def stream(
        self, method: Method[Q, A], request: Q, timeout_s: float | None, incarnation: str = ""
    ) -> AsyncGenerator[A, None]:
        """Streaming call: one request, many answers."""
        data = method.request.encode(request)
        with self._running(method, timeout_s) as (channel, deadline):
            self.num_calls += 1
            try:
                stream = channel.stream(method, data, deadline, incarnation, self.own_metadata)
                async with aclosing(stream) as answers:
                    async for answer in answers:
                        yield self._read(method.answer, answer)
            finally:
                self.num_calls -= 1

    async def bidirectional(self, method: Method[Q, A], requests: AsyncIterator[Q]) -> AsyncGenerator[A, None]:
        """Bidirectional call: many requests, many answers.

        It does not count in `num_calls`; `shared_stream` counts the requests that it carries.
        """
        with self._running(method, None) as (channel, deadline):
            call = await channel.admitted(method, deadline)
            sender = asyncio.create_task(
                _send_all(call, method.request, requests), name=f"{method.name} to {self.address}"
            )
            try:
                async for answer in call:
                    yield self._read(method.answer, answer)
            finally:
                call.cancel()
                sender.cancel()
                await asyncio.gather(sender, return_exceptions=True)

    async def require(self, method: Method[Q, A], incarnation: str) -> None:
        """Raises AnotherIncarnationError unless the process has this incarnation ("" = any); may open a session."""
        if not self._current_channel().has_session(incarnation):
            with self._running(method, None) as (channel, deadline):
                await channel.opened(method, deadline, incarnation)

    async def close(self) -> None:
        """End the connection; calls that still run fail with `WorkerLostError`."""
        self._is_closed = True
        if self._check_timer is not None:
            self._check_timer.cancel()
        channels = [self._channel, *self._former]
        for channel in list(self._former):
            self._take_former(channel)
        await asyncio.gather(*(channel.close() for channel in channels), *self._closing)

    @property
    def channel_number(self) -> int:
        """Number of the channel that the next call would use; it grows with every replacement."""
        self._current_channel()
        return self._num_channels

    @property
    def own_metadata(self) -> Metadata:
        """Headers from `metadata_source` for a call that starts now; empty without one. Shared streams send them with
        each request.
        """
        return () if self._metadata_source is None else tuple(self._metadata_source())

    @contextmanager
    def _running(self, method: Method[Q, A], timeout_s: float | None) -> Iterator[tuple[SessionChannel, Deadline]]:
        """Context of one call; raises gRPC's errors as errors of `core.errors`."""
        if self._is_closed:
            raise self._closed_error(method)
        if not self._may_talk:
            raise UntrustedPeerError(
                f"{self.address} is beyond this machine, where calls need TLS: give every process --tls-dir "
                "(TANDEM_TLS_DIR), or --insecure where everybody on the network may read and change them"
            )
        channel = self._current_channel()
        self._check_later()
        try:
            with channel.in_use():
                yield channel, Deadline(timeout_s)
        except TimeoutError:
            channel.note_timeout()
            raise WorkerLostError(f"{method.name} at {self.address} did not answer within {timeout_s} s") from None
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                channel.note_timeout()
            raise error_from(error, self.address, method.name, timeout_s) from error
        except asyncio.CancelledError:
            self._explain_cancellation(method, channel)
            raise
        finally:
            if self._former:
                self._close_former()

    def _current_channel(self) -> SessionChannel:
        channel = self._channel
        if not self._is_closed and (channel.has_timed_out or channel.is_outdated):
            self._channel, self._num_channels = self._connect(), self._num_channels + 1
            timer = None
            if channel.is_outdated:
                timer = asyncio.get_running_loop().call_later(FORMER_CERTIFICATES_S, self._close_soon, channel)
            self._former[channel] = timer
        return self._channel

    def _check_later(self) -> None:
        """Schedules a check for new certificates while a call runs, which may be the last call for days."""
        if self._has_certificates and self._check_timer is None and not self._is_closed:
            self._check_timer = asyncio.get_running_loop().call_later(CHECK_INTERVAL_S, self._check)

    def _check(self) -> None:
        self._check_timer = None
        if not self._current_channel().is_idle:
            self._check_later()

    def _close_former(self) -> None:
        """Closes replaced channels once their last calls have ended."""
        for channel in [channel for channel in self._former if channel.is_idle]:
            self._close_soon(channel)

    def _close_soon(self, channel: SessionChannel) -> None:
        self._take_former(channel)
        task = asyncio.get_running_loop().create_task(channel.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _take_former(self, channel: SessionChannel) -> None:
        timer = self._former.pop(channel)
        if timer is not None:
            timer.cancel()

    def _read(self, form: Form[A], data: bytes) -> A:
        try:
            return form.decode(data)
        except InvalidRequestError as error:
            raise WorkerLostError(f"{self.address} answered nonsense: {error}") from error

    def _closed_error(self, method: Method[Q, A]) -> TandemError:
        return WorkerLostError(f"{method.name} at {self.address}: this side has closed the connection")

    def _explain_cancellation(self, method: Method[Q, A], channel: SessionChannel) -> None:
        """NOTE: gRPC cancels the calls of a channel that is closed; that must not look like a cancelled caller."""
        task = asyncio.current_task()
        if (self._is_closed or channel.is_closed) and task is not None and not task.cancelling():
            raise self._closed_error(method)


async def _send_all(call: "grpc.aio.StreamStreamCall[bytes, bytes]", form: Form[Q], requests: AsyncIterator[Q]) -> None:
    """Sends `requests` until they end or the call has ended, which its reader notices."""
    try:
        async for request in requests:
            await call.write(form.encode(request))
        await call.done_writing()
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        pass
    except InvalidRequestError:  # NOTE: our bug, which must not leave the reader waiting
        call.cancel()
        raise
