"""One gRPC channel to a process and its session: signs calls, and repeats those whose session the server has forgotten.

Raises gRPC's own errors; `grpc_connection` translates them.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import TypeVar

import grpc

from tandem.core.errors import WorkerLostError
from tandem.rpc.credentials import Credentials, certified_role
from tandem.rpc.deadline import Deadline
from tandem.rpc.encryption import open_channel
from tandem.rpc.methods import Method
from tandem.rpc.session import Expected, Session
from tandem.rpc.session_opener import SessionOpener
from tandem.rpc.status import ADMITTED, PROOF_KEY, Metadata, is_session_unknown

Q = TypeVar("Q")
A = TypeVar("A")


class SessionChannel:
    """One gRPC channel and its session. It connects when first used, with the certificates that were current when it
    was created.

    Args:
        address: host:port.
        credentials: of this process.
        expected: requirements on the process at `address`.
    """

    def __init__(self, address: str, credentials: Credentials, expected: Expected) -> None:
        self._address = address
        self._tls = credentials.tls
        self._material = None if self._tls is None else self._tls.current()
        (role,) = {certified_role(each) for each in expected.roles}
        self._channel = open_channel(address, self._material, role)
        self._opener = SessionOpener(self._channel, address, credentials, expected)
        self._unary: dict[str, grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]] = {}
        self._num_calls = 0
        self._has_timed_out = False
        self.is_closed = False

    @property
    def has_timed_out(self) -> bool:
        """Whether a call was not answered in time although there was a connection."""
        return self._has_timed_out or self._opener.has_timed_out

    @property
    def is_outdated(self) -> bool:
        """Whether certificates have been replaced since it was created."""
        return self._tls is not None and self._tls.current() is not self._material

    def note_timeout(self) -> None:
        """Records that a call was not answered in time."""
        self._has_timed_out |= self._channel.get_state() is grpc.ChannelConnectivity.READY

    @property
    def is_idle(self) -> bool:
        return self._num_calls == 0

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Counts a call for the time of the block."""
        self._num_calls += 1
        try:
            yield
        finally:
            self._num_calls -= 1

    def has_session(self, incarnation: str) -> bool:
        """Whether a session with this incarnation is open; "" = any."""
        return self._opener.ready(incarnation) is not None

    async def call(self, method: Method[Q, A], data: bytes, deadline: Deadline, metadata: Metadata) -> bytes:
        """Unary call: one request, one answer."""
        ask = self._unary.get(method.path) or self._unary.setdefault(
            method.path, self._channel.unary_unary(method.path)
        )
        session = self._opener.ready("") or await self.opened(method, deadline)
        try:
            return await ask(data, timeout=deadline.left_s(), metadata=_signed(session, method, data, metadata))
        except grpc.aio.AioRpcError as error:
            if not is_session_unknown(error):
                raise
        self._opener.forget(session)
        session = await self.opened(method, deadline)
        return await ask(data, timeout=deadline.left_s(), metadata=_signed(session, method, data, metadata))

    async def stream(
        self, method: Method[Q, A], data: bytes, deadline: Deadline, incarnation: str, metadata: Metadata
    ) -> AsyncGenerator[bytes, None]:
        """Streaming call: one request, many answers."""
        start: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = self._channel.unary_stream(method.path)
        for is_last in (False, True):
            session = self._opener.ready(incarnation) or await self.opened(method, deadline, incarnation)
            call = start(data, timeout=deadline.left_s(), metadata=_signed(session, method, data, metadata))
            try:
                async for answer in call:
                    yield answer
                return
            except grpc.aio.AioRpcError as error:
                if is_last or not is_session_unknown(error):
                    raise
                self._opener.forget(session)
            finally:
                call.cancel()

    async def admitted(self, method: Method[Q, A], deadline: Deadline) -> "grpc.aio.StreamStreamCall[bytes, bytes]":
        """Opens a bidirectional call, and returns once it is admitted: requests sent earlier could not be repeated."""
        start: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = self._channel.stream_stream(method.path)
        for is_last in (False, True):
            session = self._opener.ready("") or await self.opened(method, deadline)
            call, is_admitted = start(metadata=((PROOF_KEY, session.signed(method.path)),)), False
            try:
                is_admitted = ADMITTED in tuple(await call.initial_metadata())
                if is_admitted:
                    return call
                await call.read()
                raise WorkerLostError(f"{self._address} ended {method.name} before it began")
            except grpc.aio.AioRpcError as error:
                if is_last or not is_session_unknown(error):
                    raise
                self._opener.forget(session)
            finally:
                if not is_admitted:
                    call.cancel()
        raise AssertionError("unreachable")

    async def opened(self, method: Method[Q, A], deadline: Deadline, incarnation: str = "") -> Session:
        """Returns a session with this incarnation ("" = any), opened if needed.

        Raises:
            TimeoutError: none could be opened within the deadline.
        """
        async with asyncio.timeout(deadline.left_s()):
            return await self._opener.opened(incarnation)

    async def close(self) -> None:
        """Closes the channel; running calls end."""
        self.is_closed = True
        await self._opener.close()
        await self._channel.close()


def _signed(session: Session, method: Method[Q, A], data: bytes, metadata: Metadata) -> Metadata:
    return ((PROOF_KEY, session.signed(method.path, data)), *metadata)
