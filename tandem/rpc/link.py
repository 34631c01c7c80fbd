"""A connection to one process: sends calls, reads answers, and turns every failure into an error of `core.errors`.

Nothing of gRPC leaves this file and `sessions`. A stream that is closed or cancelled here ends at the other side at
once. Nothing is asked of a server before it has proved who it is; every call proves who sends it.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import TypeVar

import grpc

from tandem.core.errors import InvalidRequestError, TandemError, WorkerLostError
from tandem.rpc.channel import CLIENT_OPTIONS
from tandem.rpc.credentials import Credentials
from tandem.rpc.form import Form
from tandem.rpc.methods import Method
from tandem.rpc.network import MetadataSource
from tandem.rpc.session import Expected, Session
from tandem.rpc.sessions import Sessions
from tandem.rpc.status import ADMITTED, PROOF_KEY, Metadata, error_from, is_session_unknown

Q = TypeVar("Q")
A = TypeVar("A")


class Link:
    """Calls the methods of one address. It connects when first used, and again whenever it must.

    A call may name the `incarnation` of the process that it is meant for: another one is sent nothing.

    Args:
        address: host:port.
        credentials: of this process.
        expected: what the process at `address` must be.
        metadata_source: more headers for each call, as a `traceparent`.
    """

    def __init__(
        self, address: str, credentials: Credentials, expected: Expected, metadata_source: MetadataSource | None
    ) -> None:
        self.address = address
        self.num_calls = 0
        self.was_silent = False  # a question was not answered in time, though there was a connection
        self._channel = grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS)
        self._sessions = Sessions(self._channel, address, credentials, expected)
        self._metadata_source = metadata_source
        self._is_closed = False
        self._unary: dict[str, grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]] = {}

    async def ask(self, method: Method[Q, A], request: Q, timeout_s: float | None) -> A:
        """One answer to one request."""
        data = method.request.encode(request)
        with self._running(method, timeout_s) as deadline:
            self.num_calls += 1
            try:
                return self._read(method.answer, await self._ask(method, data, deadline))
            finally:
                self.num_calls -= 1

    async def stream(
        self, method: Method[Q, A], request: Q, timeout_s: float | None, incarnation: str = ""
    ) -> AsyncGenerator[A, None]:
        """Many answers to one request."""
        data = method.request.encode(request)
        with self._running(method, timeout_s) as deadline:
            self.num_calls += 1
            try:
                async with aclosing(self._stream(method, data, deadline, incarnation)) as answers:
                    async for answer in answers:
                        yield self._read(method.answer, answer)
            finally:
                self.num_calls -= 1

    async def converse(self, method: Method[Q, A], requests: AsyncIterator[Q]) -> AsyncGenerator[A, None]:
        """Many answers to many requests. Counts as no call: what it is for, does."""
        with self._running(method, None) as deadline:
            call = await self._admitted(method, deadline)
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
        """Raises AnotherIncarnationError unless the process there is that one ("" = any); asks it only if need be."""
        if self._sessions.ready(incarnation) is None:
            with self._running(method, None) as deadline:
                await self._opened(method, deadline, incarnation)

    async def close(self, grace_s: float | None = None) -> None:
        """End the connection; calls that still run after `grace_s` fail with `WorkerLostError`."""
        self._is_closed = True
        await self._sessions.close()
        await self._channel.close(grace_s)

    @property
    def own_metadata(self) -> Sequence[tuple[str, str]]:
        """The headers that a call made now would carry beside those of every call."""
        return () if self._metadata_source is None else self._metadata_source()

    @contextmanager
    def _running(self, method: Method[Q, A], timeout_s: float | None) -> Iterator["_Deadline"]:
        """A call: what ends it is raised as an error of ours."""
        if self._is_closed:
            raise self._closed_error(method)
        try:
            yield _Deadline(timeout_s)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                self._note_silence()
            raise error_from(error, self.address, method.name, timeout_s) from error
        except asyncio.CancelledError:
            self._explain_cancellation(method)
            raise

    async def _ask(self, method: Method[Q, A], data: bytes, deadline: "_Deadline") -> bytes:
        ask = self._unary.get(method.path) or self._unary.setdefault(
            method.path, self._channel.unary_unary(method.path)
        )
        session = self._sessions.ready("") or await self._opened(method, deadline)
        try:
            return await ask(data, timeout=deadline.left_s(), metadata=self._metadata(session, method, data))
        except grpc.aio.AioRpcError as error:
            if not is_session_unknown(error):
                raise
        self._sessions.forget(session)
        session = await self._opened(method, deadline)
        return await ask(data, timeout=deadline.left_s(), metadata=self._metadata(session, method, data))

    async def _stream(
        self, method: Method[Q, A], data: bytes, deadline: "_Deadline", incarnation: str
    ) -> AsyncGenerator[bytes, None]:
        start: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = self._channel.unary_stream(method.path)
        for is_last in (False, True):
            session = self._sessions.ready(incarnation) or await self._opened(method, deadline, incarnation)
            call = start(data, timeout=deadline.left_s(), metadata=self._metadata(session, method, data))
            try:
                async for answer in call:
                    yield answer
                return
            except grpc.aio.AioRpcError as error:
                if is_last or not is_session_unknown(error):
                    raise
                self._sessions.forget(session)
            finally:
                call.cancel()

    async def _admitted(self, method: Method[Q, A], deadline: "_Deadline") -> "grpc.aio.StreamStreamCall[bytes, bytes]":
        """A call of many requests, once the server has let it in: what it was sent before could not be sent again."""
        start: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = self._channel.stream_stream(method.path)
        for is_last in (False, True):
            session = self._sessions.ready("") or await self._opened(method, deadline)
            call, is_admitted = start(metadata=((PROOF_KEY, session.signed(method.path)),)), False
            try:
                is_admitted = ADMITTED in tuple(await call.initial_metadata())
                if is_admitted:
                    return call
                await call.read()
                raise WorkerLostError(f"{self.address} ended {method.name} before it began")
            except grpc.aio.AioRpcError as error:
                if is_last or not is_session_unknown(error):
                    raise
                self._sessions.forget(session)
            finally:
                if not is_admitted:
                    call.cancel()
        raise AssertionError("unreachable")

    async def _opened(self, method: Method[Q, A], deadline: "_Deadline", incarnation: str = "") -> Session:
        try:
            async with asyncio.timeout(deadline.left_s()):
                return await self._sessions.opened(incarnation)
        except TimeoutError:
            self._note_silence()
            raise WorkerLostError(
                f"{method.name} at {self.address} did not answer within {deadline.timeout_s} s"
            ) from None

    def _note_silence(self) -> None:
        self.was_silent |= self._channel.get_state() is grpc.ChannelConnectivity.READY

    def _metadata(self, session: Session, method: Method[Q, A], data: bytes) -> Metadata:
        return ((PROOF_KEY, session.signed(method.path, data)), *self.own_metadata)

    def _read(self, form: Form[A], data: bytes) -> A:
        try:
            return form.decode(data)
        except InvalidRequestError as error:
            raise WorkerLostError(f"{self.address} answered nonsense: {error}") from error

    def _closed_error(self, method: Method[Q, A]) -> TandemError:
        return WorkerLostError(f"{method.name} at {self.address}: this side has closed the connection")

    def _explain_cancellation(self, method: Method[Q, A]) -> None:
        """NOTE: gRPC cancels the calls of a channel that is closed; that must not look like a cancelled caller."""
        task = asyncio.current_task()
        if self._is_closed and task is not None and not task.cancelling():
            raise self._closed_error(method)


class _Deadline:
    """When a call must have ended, its handshake included."""

    __slots__ = ("_ends_at_s", "timeout_s")

    def __init__(self, timeout_s: float | None) -> None:
        self.timeout_s = timeout_s
        self._ends_at_s = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s

    def left_s(self) -> float | None:
        """None = as long as it takes."""
        return None if self._ends_at_s is None else max(0.0, self._ends_at_s - asyncio.get_running_loop().time())


async def _send_all(call: "grpc.aio.StreamStreamCall[bytes, bytes]", form: Form[Q], requests: AsyncIterator[Q]) -> None:
    """Until there are no more, or the call has ended, which its reader is told."""
    try:
        async for request in requests:
            await call.write(form.encode(request))
        await call.done_writing()
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        pass
    except InvalidRequestError:  # NOTE: our bug, which must not leave the reader waiting
        call.cancel()
        raise
