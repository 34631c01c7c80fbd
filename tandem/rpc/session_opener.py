"""Opens the session of a client's channel when it is first needed, and again after the connection or session was lost.

All waiting callers share one handshake; a cancelled or expired caller does not end it. Invariant: a session ends with
the connection it was opened on. After a connection broke, another process may listen at the address; it must prove its
identity before anything is sent to it. NOTE: a call whose connection breaks between our last check and gRPC's own goes
over a new connection. Without TLS, a process that took over the address by then can read that one call, and no other.
"""

import asyncio

import grpc

from tandem.core.errors import InvalidRequestError, WorkerLostError
from tandem.rpc import methods
from tandem.rpc.credentials import Credentials
from tandem.rpc.session import Expected, Handshake, Session, check_incarnation
from tandem.rpc.state_watch import tell_of_change
from tandem.rpc.status import handshake_error

HANDSHAKE_TIMEOUT_S = 5.0
_MAX_HANDSHAKES = 3  # in a row, each on a connection that broke before its session was used
_READY = grpc.ChannelConnectivity.READY


class SessionOpener:
    """The current session of one channel. Must be used in one event loop."""

    def __init__(self, channel: grpc.aio.Channel, address: str, credentials: Credentials, expected: Expected) -> None:
        self._channel = channel
        self._open: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(methods.OPEN.path)
        self._address = address
        self._credentials = credentials
        self._expected = expected
        self._session: Session | None = None
        self._opening: asyncio.Task[Session] | None = None
        self._is_watched = False
        self.has_timed_out = False  # a handshake was not answered in time, though there was a connection

    def ready(self, incarnation: str) -> Session | None:
        """The open session with this incarnation ("" = any), or None; most calls need no more."""
        session = self._session
        if session is None or incarnation not in ("", session.server.incarnation):
            return None
        return session if self._channel.get_state() is _READY else None

    async def opened(self, incarnation: str) -> Session:
        """The session with this incarnation, opened if needed.

        Raises:
            WorkerLostError: there is no answer, or none of a Tandem server.
            UntrustedPeerError, IncompatibleProtocolError: as `Handshake.session`, or the server refuses.
            AnotherIncarnationError: the server was restarted.
        """
        for _ in range(_MAX_HANDSHAKES):
            if (session := self.ready(incarnation)) is not None:
                return session
            if self._opening is None:
                if self.ready("") is None:  # NOTE: the handshake connects, after which an old session would look ready
                    self._session = None
                self._opening = asyncio.create_task(self._shake_hands(), name=f"handshake with {self._address}")
                self._opening.add_done_callback(self._end_opening)
            session = await asyncio.shield(self._opening)
            check_incarnation(session.server, incarnation)
        if (session := self.ready(incarnation)) is None:
            raise WorkerLostError(f"the connection with {self._address} breaks whenever a session is open")
        return session

    def forget(self, session: Session) -> None:
        """Drops a session that the server does not know any more."""
        if self._session is session:
            self._session = None

    async def close(self) -> None:
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.gather(self._opening, return_exceptions=True)

    def _end_opening(self, task: asyncio.Task[Session]) -> None:
        self._opening = None
        if not task.cancelled():
            task.exception()  # NOTE: callers that waited may have gone, and the exception must be retrieved

    async def _shake_hands(self) -> Session:
        """Performs a handshake. NOTE: it expects no incarnation, since several callers may wait, each for its own."""
        handshake = Handshake(self._credentials, self._expected, self._address)
        data = methods.OPEN.request.encode(handshake.call)
        try:
            answer = methods.OPEN.answer.decode(await self._open(data, timeout=HANDSHAKE_TIMEOUT_S))
        except InvalidRequestError as error:
            raise WorkerLostError(f"{self._address} answered the handshake with nonsense") from error
        except grpc.aio.AioRpcError as error:
            state = self._channel.get_state()
            self.has_timed_out |= error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and state is _READY
            was_reached = state is not grpc.ChannelConnectivity.TRANSIENT_FAILURE
            raise handshake_error(error, self._address, HANDSHAKE_TIMEOUT_S, was_reached=was_reached) from error
        self._session = session = handshake.session(answer)
        if not self._is_watched and self._channel.get_state() is _READY:
            self._is_watched = True
            tell_of_change(self._channel, _READY, self._end_session)
        return session

    def _end_session(self) -> None:
        self._session, self._is_watched = None, False
