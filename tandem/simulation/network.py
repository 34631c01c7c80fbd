"""RPC calls between nodes in memory: implements `rpc.network.Network` over a `Fabric`, with gRPC's errors.

Messages are encoded and errors mapped as with gRPC. A call on an ended connection fails with `WorkerLostError`; while a
channel waits to reconnect, calls fail at once.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from tandem.core.errors import ConfigurationError, InvalidRequestError, TandemError, WorkerLostError
from tandem.rpc import methods
from tandem.rpc.credentials import Credentials
from tandem.rpc.form import Form
from tandem.rpc.methods import Method
from tandem.rpc.network import MetadataSource, MethodTable, RpcServer
from tandem.rpc.serve_messages import CallStatus
from tandem.rpc.session import Expected, Handshake, Session, check_incarnation
from tandem.rpc.session_opener import HANDSHAKE_TIMEOUT_S
from tandem.rpc.session_table import SessionTable
from tandem.rpc.status import error_of_status, handshake_error_of_status
from tandem.simulation.fabric import CONNECT_TIMEOUT_S, Fabric, connect_delays
from tandem.simulation.node import Node
from tandem.simulation.wire import ClientCall, MultiplexedConnection, SimulatedServer, received, sent

_FIRST_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 1.0
Q = TypeVar("Q")
A = TypeVar("A")


class SimulatedNetwork:
    """The servers of all nodes, by address."""

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        self.listeners: dict[str, SimulatedServer] = {}
        self.gone: dict[str, Node] = {}  # who listened there and died silently

    def of(self, node: Node) -> "NodeNetwork":
        return NodeNetwork(self, node)

    def crash(self, node: Node, *, is_silent: bool) -> None:
        """Removes the listeners of `node`."""
        for address in [address for address, listener in self.listeners.items() if listener.node is node]:
            del self.listeners[address]
            if is_silent:
                self.gone[address] = node
        self.fabric.crash(node, is_silent=is_silent)


class NodeNetwork:
    """`rpc.network.Network` of one node."""

    def __init__(self, network: SimulatedNetwork, node: Node) -> None:
        self._network = network
        self._node = node

    def connect(
        self, address: str, credentials: Credentials, expected: Expected, metadata_source: MetadataSource | None
    ) -> "SimulatedRpcConnection":
        spoken = replace(credentials, spoken=self._node.spoken)
        return SimulatedRpcConnection(self._network, self._node, address, spoken, expected, metadata_source)

    async def serve(self, fill: Callable[[MethodTable], None], bind: str, credentials: Credentials) -> RpcServer:
        listeners = self._network.listeners
        if bind in listeners:
            raise ConfigurationError(f"cannot listen on {bind}: it is taken; choose another")
        self._network.gone.pop(bind, None)
        sessions = SessionTable(replace(credentials, address=credentials.address or bind, spoken=self._node.spoken))
        listener = SimulatedServer(
            self._network.fabric, self._node, bind, sessions, partial(listeners.__delitem__, bind)
        )
        fill(listener)
        listeners[bind] = listener
        return listener


class SimulatedRpcConnection:
    """`rpc.network.RpcConnection` in memory; connects when first used and reconnects when needed.

    Invariant: a session belongs to one connection, and nothing but a handshake is sent before it is open.
    """

    def __init__(
        self,
        network: SimulatedNetwork,
        node: Node,
        address: str,
        credentials: Credentials,
        expected: Expected,
        metadata_source: MetadataSource | None,
    ) -> None:
        self.address = address
        self.num_calls = 0
        self._num_channels = 1
        self._has_timed_out = False
        self._network = network
        self._node = node
        self._credentials = credentials
        self._expected = expected
        self._metadata_source = metadata_source
        self._wire: MultiplexedConnection | None = None
        self._former: list[MultiplexedConnection] = []
        self._session: Session | None = None
        self._connecting: asyncio.Task[MultiplexedConnection | None] | None = None
        self._backoff_s = _FIRST_BACKOFF_S
        self._retry_at_s = 0.0
        self._failure = ""
        self._is_closed = False

    async def call(self, method: Method[Q, A], request: Q, timeout_s: float | None) -> A:
        data = sent(self._node, method.request, request)
        self._require_open(method)
        self.num_calls += 1
        call: ClientCall | None = None
        try:
            async with asyncio.timeout(timeout_s):
                call = await self._begin(method, data, timeout_s, "")
                answer = await call.inbox.get()
                if not isinstance(answer, bytes):
                    raise self._error_of(method, answer)
                call.inbox.end(CallStatus())  # NOTE: the end of the call comes with its answer
                return self._read(method.answer, answer)
        except TimeoutError:
            self._has_timed_out |= call is not None
            raise WorkerLostError(f"{method.name} at {self.address} did not answer within {timeout_s} s") from None
        finally:
            self.num_calls -= 1
            if call is not None:
                call.leave()

    async def stream(
        self, method: Method[Q, A], request: Q, timeout_s: float | None, incarnation: str = ""
    ) -> AsyncGenerator[A, None]:
        assert timeout_s is None, "no stream of ours has a deadline"
        data = sent(self._node, method.request, request)
        self._require_open(method)
        self.num_calls += 1
        call: ClientCall | None = None
        try:
            call = await self._begin(method, data, None, incarnation)
            async for answer in self._answers(method, call):
                yield answer
        finally:
            self.num_calls -= 1
            if call is not None:
                call.leave()

    async def bidirectional(self, method: Method[Q, A], requests: AsyncIterator[Q]) -> AsyncGenerator[A, None]:
        self._require_open(method)
        call = await self._begin(method, None, None, "")
        sender = asyncio.create_task(self._send_all(method, call, requests), name=f"{method.name} to {self.address}")
        try:
            async for answer in self._answers(method, call):
                yield answer
        finally:
            call.leave()
            sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)

    async def require(self, method: Method[Q, A], incarnation: str) -> None:
        self._require_open(method)
        await self._connected(method, incarnation)

    async def close(self) -> None:
        self._is_closed = True
        for wire in (*self._former, self._wire):
            if wire is not None:
                self._close_wire(wire)

    def _close_wire(self, wire: MultiplexedConnection) -> None:
        for call in list(wire.calls.values()):
            call.leave()
            call.inbox.end("")
        self._network.fabric.cut(wire.connection, "the client has closed it")

    @property
    def channel_number(self) -> int:
        self._leave_silent()
        return self._num_channels

    @property
    def own_metadata(self) -> Sequence[tuple[str, str]]:
        return () if self._metadata_source is None else self._metadata_source()

    async def _answers(self, method: Method[Any, A], call: ClientCall) -> AsyncGenerator[A, None]:
        while isinstance(answer := await call.inbox.get(), bytes):
            yield self._read(method.answer, answer)
        if answer != CallStatus():
            raise self._error_of(method, answer)

    async def _send_all(self, method: Method[Q, Any], call: ClientCall, requests: AsyncIterator[Q]) -> None:
        async for request in requests:
            call.write(sent(self._node, method.request, request))

    async def _begin(
        self, method: Method[Any, Any], data: bytes | None, timeout_s: float | None, incarnation: str
    ) -> ClientCall:
        wire, session = await self._connected(method, incarnation)
        return wire.begin(method.path, data, timeout_s, session.signed(method.path, data or b""))

    async def _connected(self, method: Method[Any, Any], incarnation: str) -> tuple[MultiplexedConnection, Session]:
        """The open connection and its session. Raises AnotherIncarnationError unless the process there is `incarnation`
        ("" = any).
        """
        self._leave_silent()
        if self._wire is None or self._wire.connection.is_over:
            self._wire = None
            await self._connect(method)
        self._require_open(method)
        assert self._wire is not None
        assert self._session is not None
        check_incarnation(self._session.server, incarnation)
        return self._wire, self._session

    def _leave_silent(self) -> None:
        """NOTE: running calls continue on it, as in `rpc.grpc_connection`."""
        if not self._has_timed_out:
            return
        self._has_timed_out = False
        self._num_channels += 1
        former = [wire for wire in (*self._former, self._wire) if wire is not None and not wire.connection.is_over]
        self._wire, self._former = None, [wire for wire in former if wire.calls]
        for wire in former:
            if not wire.calls:
                self._close_wire(wire)

    async def _connect(self, method: Method[Any, Any]) -> None:
        loop = asyncio.get_running_loop()
        if self._connecting is None:
            if loop.time() < self._retry_at_s:  # NOTE: a channel that waits for its next try fails calls at once
                raise self._lost(method, self._failure)
            self._connecting = self._node.spawn(self._network.fabric.loop, self._reach(), f"connect {self.address}")
            self._connecting.add_done_callback(_take_error)
        self._wire = await asyncio.shield(self._connecting)
        if self._wire is None:
            raise self._lost(method, self._failure)

    async def _reach(self) -> MultiplexedConnection | None:
        """Returns None if it failed; `_failure` is the reason then."""
        try:
            return await self._handshake(await self._dial())
        except OSError as error:
            loop = asyncio.get_running_loop()
            self._failure, self._retry_at_s = str(error), loop.time() + self._backoff_s
            self._backoff_s = min(2 * self._backoff_s, _MAX_BACKOFF_S)
            return None
        finally:
            self._connecting = None

    async def _handshake(self, wire: MultiplexedConnection) -> MultiplexedConnection:
        """Performs a handshake, as `rpc.session_opener`.

        Raises:
            TandemError: as `Handshake.session`; or it was refused.
            OSError: the connection has ended, or there is no answer.
        """
        method, handshake = methods.OPEN, Handshake(self._credentials, self._expected, self.address)
        call = wire.begin(method.path, method.request.encode(handshake.call), HANDSHAKE_TIMEOUT_S, "")
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                answer = await call.inbox.get()
            if isinstance(answer, bytes):
                call.inbox.end(CallStatus())
                self._session = handshake.session(method.answer.decode(answer))
                return wire
        except TimeoutError:
            self._has_timed_out = True
            answer = f"no handshake within {HANDSHAKE_TIMEOUT_S} s"
        finally:
            call.leave()
            if self._session is None or not isinstance(answer, bytes):
                self._network.fabric.cut(wire.connection, "no session was opened")
        if isinstance(answer, str):
            raise ConnectionError(answer)
        raise handshake_error_of_status(answer, self.address)

    async def _dial(self) -> MultiplexedConnection:
        """Connects. Raises OSError: nothing listens, or there is no answer within `CONNECT_TIMEOUT_S`."""
        loop, network = asyncio.get_running_loop(), self._network
        ends_s = loop.time() + CONNECT_TIMEOUT_S
        while loop.time() < ends_s:
            await connect_delays(network.fabric)
            listener = network.listeners.get(self.address)
            host = network.gone.get(self.address) if listener is None else listener.node
            can_talk = host is None or network.fabric.can_talk(self._node.name, host.name)
            if host is None:
                raise ConnectionRefusedError("connection refused")
            if can_talk and listener is not None and not host.is_paused:
                self._backoff_s = _FIRST_BACKOFF_S
                return MultiplexedConnection(network.fabric, self._node, listener)
            await asyncio.sleep(0.5)
        raise ConnectionError("connecting timed out")

    def _error_of(self, method: Method[Any, Any], answer: CallStatus | str) -> TandemError:
        if isinstance(answer, str):
            return self._closed(method) if self._is_closed else self._lost(method, answer)
        error = error_of_status(answer, self.address, method.name)
        return error or self._lost(method, "it ended without an answer")

    def _read(self, form: Form[A], data: bytes) -> A:
        try:
            return received(self._node, form, data)
        except InvalidRequestError as error:
            raise WorkerLostError(f"{self.address} answered nonsense: {error}") from error

    def _require_open(self, method: Method[Any, Any]) -> None:
        if self._is_closed:
            raise self._closed(method)

    def _closed(self, method: Method[Any, Any]) -> TandemError:
        return WorkerLostError(f"{method.name} at {self.address}: this side has closed the connection")

    def _lost(self, method: Method[Any, Any], why: str) -> TandemError:
        return WorkerLostError(f"{method.name} at {self.address} was lost (UNAVAILABLE): {why}")


def _take_error(task: "asyncio.Task[MultiplexedConnection | None]") -> None:
    """NOTE: marks the exception as retrieved, since all waiting callers may have gone."""
    if not task.cancelled():
        task.exception()
