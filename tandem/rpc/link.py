"""A connection to one process: sends calls, reads answers, and turns every failure into an error of `core.errors`.

Nothing of gRPC leaves this file. A stream that is closed or cancelled here ends at the other side at once.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import TypeVar

import grpc

from tandem.core.errors import InvalidRequestError, TandemError, WorkerLostError
from tandem.rpc.channel import CLIENT_OPTIONS, cluster_token
from tandem.rpc.form import Form
from tandem.rpc.messages import PROTOCOL_VERSION
from tandem.rpc.methods import Method
from tandem.rpc.network import MetadataSource
from tandem.rpc.status import TOKEN_KEY, VERSION_KEY, Metadata, error_from

Q = TypeVar("Q")
A = TypeVar("A")


class Link:
    """Calls the methods of one address. It connects when first used, and again whenever it must.

    Args:
        address: host:port.
        secret: of the cluster; None sends no token.
        metadata_source: more headers for each call, as a `traceparent`.
    """

    def __init__(self, address: str, secret: bytes | None, metadata_source: MetadataSource | None) -> None:
        self.address = address
        self.num_calls = 0
        self.was_silent = False  # a question was not answered in time, though there was a connection
        self._channel = grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS)
        self._metadata_source = metadata_source
        token: Metadata = () if secret is None else ((TOKEN_KEY, cluster_token(secret)),)
        self._fixed_metadata: Metadata = ((VERSION_KEY, str(PROTOCOL_VERSION)), *token)
        self._is_closed = False
        self._unary: dict[str, grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]] = {}

    async def ask(self, method: Method[Q, A], request: Q, timeout_s: float | None) -> A:
        """One answer to one request."""
        data = method.request.encode(request)
        self._require_open(method)
        self.num_calls += 1
        try:
            ask = self._unary.get(method.path) or self._unary.setdefault(
                method.path, self._channel.unary_unary(method.path)
            )
            return self._read(method.answer, await ask(data, timeout=timeout_s, metadata=self._metadata()))
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                self.was_silent |= self._channel.get_state() is grpc.ChannelConnectivity.READY
            raise error_from(error, self.address, method.name, timeout_s) from error
        except asyncio.CancelledError:
            self._explain_cancellation(method)
            raise
        finally:
            self.num_calls -= 1

    async def stream(self, method: Method[Q, A], request: Q, timeout_s: float | None) -> AsyncGenerator[A, None]:
        """Many answers to one request."""
        data = method.request.encode(request)
        self._require_open(method)
        self.num_calls += 1
        start: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = self._channel.unary_stream(method.path)
        call = start(data, timeout=timeout_s, metadata=self._metadata())
        try:
            async for answer in call:
                yield self._read(method.answer, answer)
        except grpc.aio.AioRpcError as error:
            raise error_from(error, self.address, method.name, timeout_s) from error
        except asyncio.CancelledError:
            self._explain_cancellation(method)
            raise
        finally:
            call.cancel()
            self.num_calls -= 1

    async def converse(self, method: Method[Q, A], requests: AsyncIterator[Q]) -> AsyncGenerator[A, None]:
        """Many answers to many requests. Counts as no call: what it is for, does."""
        self._require_open(method)
        start: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = self._channel.stream_stream(method.path)
        call = start(metadata=self._fixed_metadata)
        sender = asyncio.create_task(_send_all(call, method.request, requests), name=f"{method.name} to {self.address}")
        try:
            async for answer in call:
                yield self._read(method.answer, answer)
        except grpc.aio.AioRpcError as error:
            raise error_from(error, self.address, method.name, None) from error
        except asyncio.CancelledError:
            self._explain_cancellation(method)
            raise
        finally:
            call.cancel()
            sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)

    async def close(self, grace_s: float | None = None) -> None:
        """End the connection; calls that still run after `grace_s` fail with `WorkerLostError`."""
        self._is_closed = True
        await self._channel.close(grace_s)

    @property
    def own_metadata(self) -> Sequence[tuple[str, str]]:
        """The headers that a call made now would carry beside those of every call."""
        return () if self._metadata_source is None else self._metadata_source()

    def _metadata(self) -> Metadata:
        return (*self._fixed_metadata, *self.own_metadata)

    def _read(self, form: Form[A], data: bytes) -> A:
        try:
            return form.decode(data)
        except InvalidRequestError as error:
            raise WorkerLostError(f"{self.address} answered nonsense: {error}") from error

    def _require_open(self, method: Method[Q, A]) -> None:
        if self._is_closed:
            raise self._closed_error(method)

    def _closed_error(self, method: Method[Q, A]) -> TandemError:
        return WorkerLostError(f"{method.name} at {self.address}: this side has closed the connection")

    def _explain_cancellation(self, method: Method[Q, A]) -> None:
        """NOTE: gRPC cancels the calls of a channel that is closed; that must not look like a cancelled caller."""
        task = asyncio.current_task()
        if self._is_closed and task is not None and not task.cancelling():
            raise self._closed_error(method)


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
