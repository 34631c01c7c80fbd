"""The session of one connection: opened when first needed, once for all who wait, and anew when either was lost.

Invariant: a session is used on the connection it was opened on. What listens at the address after a connection broke
may be somebody else, who must prove itself before it is sent anything. A caller that is cancelled, or whose time is up,
ends no handshake that others wait for.
"""

import asyncio

import grpc

from tandem.core.errors import InvalidRequestError, WorkerLostError
from tandem.rpc import methods
from tandem.rpc.credentials import Credentials
from tandem.rpc.session import Expected, Handshake, Session, check_incarnation
from tandem.rpc.status import handshake_error

HANDSHAKE_TIMEOUT_S = 5.0


class Sessions:
    """Of one channel. Must be used in one event loop."""

    def __init__(self, channel: grpc.aio.Channel, address: str, credentials: Credentials, expected: Expected) -> None:
        self._channel = channel
        self._open: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(methods.OPEN.path)
        self._address = address
        self._credentials = credentials
        self._expected = expected
        self._session: Session | None = None
        self._opening: asyncio.Task[Session] | None = None

    def ready(self, incarnation: str) -> Session | None:
        """The session with this incarnation ("" = any), if it is open: what most calls find."""
        session = self._session
        if session is None or incarnation not in ("", session.server.incarnation):
            return None
        return session if self._channel.get_state() is grpc.ChannelConnectivity.READY else None

    async def opened(self, incarnation: str) -> Session:
        """The session with this incarnation, opened if need be.

        Raises:
            WorkerLostError: nobody answers, or not as a server of ours would.
            UntrustedPeerError, IncompatibleProtocolError: as `Handshake.session`, or the server refuses.
            AnotherIncarnationError: it was started again.
        """
        if (session := self.ready(incarnation)) is not None:
            return session
        if self._opening is None:
            self._session = None  # NOTE: the handshake connects; from then on the channel looks ready to others
            self._opening = asyncio.create_task(self._shake_hands(), name=f"handshake with {self._address}")
            self._opening.add_done_callback(self._end_opening)
        session = await asyncio.shield(self._opening)
        check_incarnation(session.server, incarnation)
        return session

    def forget(self, session: Session) -> None:
        """The server does not know it any more."""
        if self._session is session:
            self._session = None

    async def close(self) -> None:
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.gather(self._opening, return_exceptions=True)

    def _end_opening(self, task: asyncio.Task[Session]) -> None:
        self._opening = None
        if not task.cancelled():
            task.exception()  # NOTE: those who waited may have gone; then nobody else would take it

    async def _shake_hands(self) -> Session:
        """NOTE: expects no incarnation: several callers may wait, each for its own."""
        handshake = Handshake(self._credentials, self._expected, self._address)
        data = methods.OPEN.request.encode(handshake.call)
        try:
            answer = methods.OPEN.answer.decode(await self._open(data, timeout=HANDSHAKE_TIMEOUT_S))
        except InvalidRequestError as error:
            raise WorkerLostError(f"{self._address} answered the handshake with nonsense") from error
        except grpc.aio.AioRpcError as error:
            was_reached = self._channel.get_state() is not grpc.ChannelConnectivity.TRANSIENT_FAILURE
            raise handshake_error(error, self._address, HANDSHAKE_TIMEOUT_S, was_reached=was_reached) from error
        self._session = handshake.session(answer)
        return self._session
