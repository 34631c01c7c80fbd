"""Both ends of simulated RPC calls, and the connection that they share; used by `network`.

Invariant: a handler whose caller has gone is cancelled when it is notified of that; its errors are sent to the caller
as gRPC would. Every request and response is encoded and decoded.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import grpc

from tandem.core.errors import TandemError, WorkerLostError
from tandem.rpc import methods
from tandem.rpc.context import incoming_traceparent
from tandem.rpc.form import Form
from tandem.rpc.methods import Method
from tandem.rpc.network import RpcServer
from tandem.rpc.serve_messages import CallStatus
from tandem.rpc.session_table import NotAdmittedError, SessionTable
from tandem.rpc.status import status_of
from tandem.simulation.fabric import Fabric, Pipe, SimulatedConnection
from tandem.simulation.node import Node
from tandem.simulation.previous_release import as_previous_release

Q = TypeVar("Q")
A = TypeVar("A")


class Inbox:
    """Queue of messages for one reader, followed by an end (a status, or the reason of a lost connection)."""

    def __init__(self) -> None:
        self._items: deque[bytes] = deque()
        self._status: CallStatus | str | None = None  # text: the connection was lost
        self._has_any = asyncio.Event()

    @property
    def has_ended(self) -> bool:
        return self._status is not None

    def put(self, item: bytes) -> None:
        if self._status is None:
            self._items.append(item)
            self._has_any.set()

    def end(self, status: CallStatus | str) -> None:
        if self._status is None:
            self._status = status
            self._has_any.set()

    async def get(self) -> bytes | CallStatus | str:
        await self._has_any.wait()
        if self._items:
            item = self._items.popleft()
            if not self._items and self._status is None:
                self._has_any.clear()
            return item
        assert self._status is not None
        return self._status


class ClientCall:
    """Caller's end of one call. Call `leave` when its answers are not read any more."""

    def __init__(self, wire: "MultiplexedConnection", number: int) -> None:
        self.inbox = Inbox()
        self._wire = wire
        self._number = number

    def write(self, data: bytes) -> None:
        self._wire.send_up("request", self._number, data)

    def leave(self) -> None:
        self._wire.calls.pop(self._number, None)
        if not self.inbox.has_ended:
            self._wire.send_up("leave", self._number, b"")


class ServerCall:
    """Server's end of one call. `requests`: those after the first."""

    def __init__(self, wire: "MultiplexedConnection", number: int) -> None:
        self.requests = Inbox()
        self.task: asyncio.Task[None] | None = None
        self._wire = wire
        self._number = number

    def write(self, data: bytes) -> None:
        self._wire.send_down("answer", self._number, data)

    async def room(self) -> None:
        """Waits until more may be written; other tasks run meanwhile."""
        await asyncio.sleep(0)
        await self._wire.connection.down.room()

    def end(self, status: CallStatus) -> None:
        self._wire.served.pop(self._number, None)
        self._wire.send_down("end", self._number, status)


_Serve = Callable[[ServerCall, bytes | None], Awaitable[None]]


class SimulatedServer(RpcServer):
    """Serves the RPC methods of one address to callers with a session."""

    def __init__(
        self, fabric: Fabric, node: Node, address: str, sessions: SessionTable, on_stop: Callable[[], None]
    ) -> None:
        self.port = int(address.rpartition(":")[2])
        self.address = address
        self.node = node
        self.methods: dict[str, _Serve] = {}
        self.wires: list[MultiplexedConnection] = []
        self._fabric = fabric
        self._sessions = sessions
        self._on_stop = on_stop

    def unary(self, method: Method[Q, A], respond: Callable[[Q], Awaitable[A]]) -> None:
        async def serve(call: ServerCall, data: bytes | None) -> None:
            assert data is not None
            call.write(self._answer(method, await respond(received(self.node, method.request, data))))

        self.methods[method.path] = serve

    def stream(self, method: Method[Q, A], respond: Callable[[Q], AsyncIterator[A]]) -> None:
        async def serve(call: ServerCall, data: bytes | None) -> None:
            assert data is not None
            await self._write_all(method, call, respond(received(self.node, method.request, data)))

        self.methods[method.path] = serve

    def bidirectional(self, method: Method[Q, A], respond: Callable[[AsyncIterator[Q]], AsyncIterator[A]]) -> None:
        async def serve(call: ServerCall, data: bytes | None) -> None:
            await self._write_all(method, call, respond(self._read_all(method.request, call)))

        self.methods[method.path] = serve

    async def stop(self, grace_s: float = 0.0) -> None:
        self._on_stop()
        tasks = [call.task for wire in self.wires for call in wire.served.values() if call.task is not None]
        if tasks and grace_s:
            await asyncio.wait(tasks, timeout=grace_s)
        for wire in list(self.wires):
            self._fabric.cut(wire.connection, "the server has stopped")

    def open(
        self,
        wire: "MultiplexedConnection",
        path: str,
        number: int,
        data: bytes | None,
        timeout_s: float | None,
        proof: str,
    ) -> None:
        """Handles the arrival of a call."""
        call = wire.served[number] = ServerCall(wire, number)
        loop = self._fabric.loop
        call.task = self.node.spawn(loop, self._run(path, call, data, proof), f"{path} of {self.address}")
        if timeout_s is not None:  # NOTE: the caller's deadline travels with the call
            loop.call_later(timeout_s, call.task.cancel)

    async def _run(self, path: str, call: ServerCall, data: bytes | None, proof: str) -> None:
        incoming_traceparent.set(None)
        try:
            if path == methods.OPEN.path:
                self._shake_hands(call, data or b"")
                return
            self._sessions.admit(proof, path, data or b"")
            serve = self.methods.get(path)
            if serve is None:
                call.end(CallStatus(grpc.StatusCode.UNIMPLEMENTED.value[0], f"no method {path}"))
                return
            await serve(call, data)
        except (Exception, asyncio.CancelledError) as error:  # NOTE: whatever a handler raises is sent to its caller
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise asyncio.CancelledError from error
            self._fail(path, call, error)
        else:
            call.end(CallStatus())

    def _answer(self, method: Method[Any, A], answer: A) -> bytes:
        data = method.encode_answer(answer)
        return as_previous_release(method.answer.message_type, data) if self.node.is_previous_release else data

    async def _write_all(self, method: Method[Any, A], call: ServerCall, answers: AsyncIterator[A]) -> None:
        try:
            async for answer in answers:
                call.write(self._answer(method, answer))
                await call.room()
        finally:
            close = getattr(answers, "aclose", None)
            if close is not None:
                await close()

    async def _read_all(self, form: Form[Q], call: ServerCall) -> AsyncIterator[Q]:
        while isinstance(data := await call.requests.get(), bytes):
            yield received(self.node, form, data)

    def _shake_hands(self, call: ServerCall, data: bytes) -> None:
        method = methods.OPEN
        call.write(method.encode_answer(self._sessions.open(method.request.decode(data))))
        call.end(CallStatus())

    def _fail(self, path: str, call: ServerCall, error: BaseException) -> None:
        if isinstance(error, NotAdmittedError):
            call.end(CallStatus(error.code.value[0], str(error), dict(error.trailing)))
            return
        if isinstance(error, asyncio.CancelledError):
            error = WorkerLostError(f"{path} was cancelled by the process that served it")
        if not isinstance(error, TandemError):
            self._fabric.loop.bugs.append(f"{path} at {self.node.name}: {type(error).__name__}: {error}")
        call.end(status_of(error))


class MultiplexedConnection:
    """A connection between two nodes and the calls on it."""

    def __init__(self, fabric: Fabric, client: Node, listener: SimulatedServer) -> None:
        self.calls: dict[int, ClientCall] = {}
        self.served: dict[int, ServerCall] = {}
        self._fabric = fabric
        self._listener = listener
        self._num_calls = 0
        self.connection = SimulatedConnection(
            Pipe(fabric, client, listener.node), Pipe(fabric, listener.node, client), self._lose, self._drop
        )
        fabric.connections.append(self.connection)
        listener.wires.append(self)

    def begin(self, path: str, data: bytes | None, timeout_s: float | None, proof: str) -> ClientCall:
        self._num_calls += 1
        number = self._num_calls
        call = self.calls[number] = ClientCall(self, number)
        self._note("call", path, number, data)
        self.connection.up.send(lambda: self._listener.open(self, path, number, data, timeout_s, proof))
        return call

    def send_up(self, what: str, number: int, data: bytes) -> None:
        if self.connection.is_over:
            return
        self._note("up", what, number, data)
        self.connection.up.send(lambda: self._take_up(what, number, data))

    def send_down(self, what: str, number: int, data: bytes | CallStatus) -> None:
        if self.connection.is_over:
            return
        self._note("down", what, number, data if isinstance(data, bytes) else data.details.encode())
        self.connection.down.send(lambda: self._take_down(number, data))

    def _take_up(self, what: str, number: int, data: bytes) -> None:
        call = self.served.get(number)
        if call is None:
            return
        if what == "request":
            call.requests.put(data)
            return
        del self.served[number]
        call.requests.end("the caller has left")
        if call.task is not None:
            call.task.cancel()

    def _take_down(self, number: int, data: bytes | CallStatus) -> None:
        call = self.calls.get(number)
        if call is None:
            return
        if isinstance(data, bytes):
            call.inbox.put(data)
        else:
            call.inbox.end(data)

    def _lose(self, why: str) -> None:
        """Ends all calls at the client."""
        for call in self.calls.values():
            call.inbox.end(why)

    def _drop(self, why: str) -> None:
        """Ends all calls at the server."""
        self._listener.wires.remove(self)
        served, self.served = self.served, {}
        for call in served.values():
            call.requests.end(why)
            if call.task is not None:
                call.task.cancel()

    def _note(self, what: str, name: str, number: int, data: bytes | None) -> None:
        fabric, (client, server) = self._fabric, self.connection.names
        size = 0 if data is None else len(data)
        fabric.trace.note(f"{fabric.loop.time():.9f}", client, server, what, name, number, size)


def sent(node: Node, form: Form[Q], value: Q) -> bytes:
    """Encodes a request as this node sends it (of the previous release: without newer fields)."""
    data = form.encode(value)
    return as_previous_release(form.message_type, data) if node.is_previous_release else data


def received(node: Node, form: Form[Q], data: bytes) -> Q:
    """Decodes a message as this node reads it (of the previous release: without newer fields)."""
    return form.decode(as_previous_release(form.message_type, data) if node.is_previous_release else data)
