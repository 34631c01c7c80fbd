"""Calls between nodes in memory: `rpc.network.Network` over a `Fabric`, with the codecs and error mapping of gRPC's.

Invariant: a handler whose caller has gone is cancelled once the news of that arrive; a call on a connection that is
over fails with `WorkerLostError`; every request and answer is encoded and decoded on its way.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import grpc

from tandem.core.errors import ConfigurationError, InvalidRequestError, TandemError, WorkerLostError
from tandem.rpc.context import incoming_traceparent
from tandem.rpc.form import Form
from tandem.rpc.methods import Method
from tandem.rpc.network import MetadataSource, MethodTable
from tandem.rpc.serve_messages import Ending
from tandem.rpc.server import RpcServer
from tandem.rpc.status import ending_of, error_of_ending
from tandem.simulation.fabric import CONNECT_TIMEOUT_S, Connection, Fabric, Pipe, connect_delays
from tandem.simulation.node import Node

_FIRST_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 1.0
Q = TypeVar("Q")
A = TypeVar("A")


class _Inbox:
    """Items that arrive for one reader, then an end."""

    def __init__(self) -> None:
        self._items: deque[bytes] = deque()
        self._ending: Ending | str | None = None  # text: the connection was lost
        self._has_any = asyncio.Event()

    @property
    def has_ended(self) -> bool:
        return self._ending is not None

    def put(self, item: bytes) -> None:
        if self._ending is None:
            self._items.append(item)
            self._has_any.set()

    def end(self, ending: Ending | str) -> None:
        if self._ending is None:
            self._ending = ending
            self._has_any.set()

    async def take(self) -> bytes | Ending | str:
        await self._has_any.wait()
        if self._items:
            item = self._items.popleft()
            if not self._items and self._ending is None:
                self._has_any.clear()
            return item
        assert self._ending is not None
        return self._ending


class _Call:
    """One call at its caller's end. `leave` once nobody reads it any more."""

    def __init__(self, wire: "_Wire", number: int) -> None:
        self.inbox = _Inbox()
        self._wire = wire
        self._number = number

    def write(self, data: bytes) -> None:
        self._wire.send_up("request", self._number, data)

    def leave(self) -> None:
        self._wire.calls.pop(self._number, None)
        if not self.inbox.has_ended:
            self._wire.send_up("leave", self._number, b"")


class _Served:
    """One call at its server's end. `requests` are those after the first."""

    def __init__(self, wire: "_Wire", number: int) -> None:
        self.requests = _Inbox()
        self.task: asyncio.Task[None] | None = None
        self._wire = wire
        self._number = number

    def write(self, data: bytes) -> None:
        self._wire.send_down("answer", self._number, data)

    async def room(self) -> None:
        """Until more may be written; other tasks run meanwhile."""
        await asyncio.sleep(0)
        await self._wire.connection.down.room()

    def end(self, ending: Ending) -> None:
        self._wire.served.pop(self._number, None)
        self._wire.send_down("end", self._number, ending)


_Serve = Callable[[_Served, bytes | None], Awaitable[None]]


class Listener(RpcServer):
    """Serves the methods of one address."""

    def __init__(self, fabric: Fabric, node: Node, address: str, on_stop: Callable[[], None]) -> None:
        self.port = int(address.rpartition(":")[2])
        self.address = address
        self.node = node
        self.methods: dict[str, _Serve] = {}
        self.wires: list[_Wire] = []
        self._fabric = fabric
        self._on_stop = on_stop

    def unary(self, method: Method[Q, A], respond: Callable[[Q], Awaitable[A]]) -> None:
        async def serve(call: _Served, data: bytes | None) -> None:
            assert data is not None
            call.write(method.encode_answer(await respond(method.request.decode(data))))

        self.methods[method.path] = serve

    def stream(self, method: Method[Q, A], respond: Callable[[Q], AsyncIterator[A]]) -> None:
        async def serve(call: _Served, data: bytes | None) -> None:
            assert data is not None
            await _write_all(method, call, respond(method.request.decode(data)))

        self.methods[method.path] = serve

    def conversation(self, method: Method[Q, A], respond: Callable[[AsyncIterator[Q]], AsyncIterator[A]]) -> None:
        async def serve(call: _Served, data: bytes | None) -> None:
            await _write_all(method, call, respond(_read_all(method.request, call)))

        self.methods[method.path] = serve

    async def stop(self, grace_s: float = 0.0) -> None:
        self._on_stop()
        tasks = [call.task for wire in self.wires for call in wire.served.values() if call.task is not None]
        if tasks and grace_s:
            await asyncio.wait(tasks, timeout=grace_s)
        for wire in list(self.wires):
            self._fabric.cut(wire.connection, "the server has stopped")

    def open(self, wire: "_Wire", path: str, number: int, data: bytes | None, timeout_s: float | None) -> None:
        """A call has arrived."""
        call = wire.served[number] = _Served(wire, number)
        loop = self._fabric.loop
        call.task = self.node.spawn(loop, self._run(path, call, data), f"{path} of {self.address}")
        if timeout_s is not None:  # NOTE: the caller's deadline travels with the call
            loop.call_later(timeout_s, call.task.cancel)

    async def _run(self, path: str, call: _Served, data: bytes | None) -> None:
        incoming_traceparent.set(None)
        try:
            serve = self.methods.get(path)
            if serve is None:
                call.end(Ending(grpc.StatusCode.UNIMPLEMENTED.value[0], f"no method {path}"))
                return
            await serve(call, data)
        except (Exception, asyncio.CancelledError) as error:  # NOTE: whatever a handler raises is sent to its caller
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise asyncio.CancelledError from error
            self._fail(path, call, error)
        else:
            call.end(Ending())

    def _fail(self, path: str, call: _Served, error: BaseException) -> None:
        if isinstance(error, asyncio.CancelledError):
            error = WorkerLostError(f"{path} was cancelled by the process that served it")
        if not isinstance(error, TandemError):
            self._fabric.loop.bugs.append(f"{path} at {self.node.name}: {type(error).__name__}: {error}")
        call.end(ending_of(error))


class _Wire:
    """A connection and the calls on it."""

    def __init__(self, fabric: Fabric, client: Node, listener: Listener) -> None:
        self.calls: dict[int, _Call] = {}
        self.served: dict[int, _Served] = {}
        self._fabric = fabric
        self._listener = listener
        self._num_calls = 0
        self.connection = Connection(
            Pipe(fabric, client, listener.node), Pipe(fabric, listener.node, client), self._lose, self._drop
        )
        fabric.connections.append(self.connection)
        listener.wires.append(self)

    def begin(self, path: str, data: bytes | None, timeout_s: float | None) -> _Call:
        self._num_calls += 1
        number = self._num_calls
        call = self.calls[number] = _Call(self, number)
        self._note("call", path, number, data)
        self.connection.up.send(lambda: self._listener.open(self, path, number, data, timeout_s))
        return call

    def send_up(self, what: str, number: int, data: bytes) -> None:
        if self.connection.is_over:
            return
        self._note("up", what, number, data)
        self.connection.up.send(lambda: self._take_up(what, number, data))

    def send_down(self, what: str, number: int, data: bytes | Ending) -> None:
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

    def _take_down(self, number: int, data: bytes | Ending) -> None:
        call = self.calls.get(number)
        if call is None:
            return
        if isinstance(data, bytes):
            call.inbox.put(data)
        else:
            call.inbox.end(data)

    def _lose(self, why: str) -> None:
        """At the client."""
        for call in self.calls.values():
            call.inbox.end(why)

    def _drop(self, why: str) -> None:
        """At the server."""
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


class SimulatedNetwork:
    """All listeners, by address."""

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        self.listeners: dict[str, Listener] = {}
        self.gone: dict[str, Node] = {}  # who listened there and died silently

    def of(self, node: Node) -> "NodeNetwork":
        return NodeNetwork(self, node)

    def crash(self, node: Node, *, is_silent: bool) -> None:
        """`node` listens nowhere any more."""
        for address in [address for address, listener in self.listeners.items() if listener.node is node]:
            del self.listeners[address]
            if is_silent:
                self.gone[address] = node
        self.fabric.crash(node, is_silent=is_silent)


class NodeNetwork:
    """`rpc.network.Network` as one node has it."""

    def __init__(self, network: SimulatedNetwork, node: Node) -> None:
        self._network = network
        self._node = node

    def connect(self, address: str, metadata_source: MetadataSource | None) -> "SimulatedLine":
        return SimulatedLine(self._network, self._node, address, metadata_source)

    async def serve(self, fill: Callable[[MethodTable], None], bind: str) -> RpcServer:
        listeners = self._network.listeners
        if bind in listeners:
            raise ConfigurationError(f"cannot listen on {bind}: it is taken; choose another")
        self._network.gone.pop(bind, None)
        listener = Listener(self._network.fabric, self._node, bind, partial(listeners.__delitem__, bind))
        fill(listener)
        listeners[bind] = listener
        return listener


class SimulatedLine:
    """`rpc.network.Line` in memory. It connects when first used, and again whenever it must."""

    def __init__(
        self, network: SimulatedNetwork, node: Node, address: str, metadata_source: MetadataSource | None
    ) -> None:
        self.address = address
        self.num_calls = 0
        self.was_silent = False
        self._network = network
        self._node = node
        self._metadata_source = metadata_source
        self._wire: _Wire | None = None
        self._connecting: asyncio.Task[_Wire | None] | None = None
        self._backoff_s = _FIRST_BACKOFF_S
        self._retry_at_s = 0.0
        self._failure = ""
        self._is_closed = False

    async def ask(self, method: Method[Q, A], request: Q, timeout_s: float | None) -> A:
        data = method.request.encode(request)
        self._require_open(method)
        self.num_calls += 1
        call: _Call | None = None
        try:
            async with asyncio.timeout(timeout_s):
                call = await self._begin(method, data, timeout_s)
                answer = await call.inbox.take()
                if not isinstance(answer, bytes):
                    raise self._error_of(method, answer)
                call.inbox.end(Ending())  # NOTE: the end of the call comes with its answer
                return self._read(method.answer, answer)
        except TimeoutError:
            self.was_silent |= call is not None
            raise WorkerLostError(f"{method.name} at {self.address} did not answer within {timeout_s} s") from None
        finally:
            self.num_calls -= 1
            if call is not None:
                call.leave()

    async def stream(self, method: Method[Q, A], request: Q, timeout_s: float | None) -> AsyncGenerator[A, None]:
        assert timeout_s is None, "no stream of ours has a deadline"
        data = method.request.encode(request)
        self._require_open(method)
        self.num_calls += 1
        call: _Call | None = None
        try:
            call = await self._begin(method, data, None)
            async for answer in self._answers(method, call):
                yield answer
        finally:
            self.num_calls -= 1
            if call is not None:
                call.leave()

    async def converse(self, method: Method[Q, A], requests: AsyncIterator[Q]) -> AsyncGenerator[A, None]:
        self._require_open(method)
        call = await self._begin(method, None, None)
        sender = asyncio.create_task(self._send_all(method, call, requests), name=f"{method.name} to {self.address}")
        try:
            async for answer in self._answers(method, call):
                yield answer
        finally:
            call.leave()
            sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)

    async def close(self, grace_s: float | None = None) -> None:
        self._is_closed = True
        wire = self._wire
        if wire is None:
            return
        if grace_s and wire.calls:
            with suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    while wire.calls:
                        await asyncio.sleep(0.1)
        for call in list(wire.calls.values()):
            call.leave()
            call.inbox.end("")
        self._network.fabric.cut(wire.connection, "the client has closed it")

    @property
    def own_metadata(self) -> Sequence[tuple[str, str]]:
        return () if self._metadata_source is None else self._metadata_source()

    async def _answers(self, method: Method[Any, A], call: _Call) -> AsyncGenerator[A, None]:
        while isinstance(answer := await call.inbox.take(), bytes):
            yield self._read(method.answer, answer)
        if answer != Ending():
            raise self._error_of(method, answer)

    async def _send_all(self, method: Method[Q, Any], call: _Call, requests: AsyncIterator[Q]) -> None:
        async for request in requests:
            call.write(method.request.encode(request))

    async def _begin(self, method: Method[Any, Any], data: bytes | None, timeout_s: float | None) -> _Call:
        if self._wire is None or self._wire.connection.is_over:
            self._wire = None
            await self._connect(method)
        self._require_open(method)
        assert self._wire is not None
        return self._wire.begin(method.path, data, timeout_s)

    async def _connect(self, method: Method[Any, Any]) -> None:
        loop = asyncio.get_running_loop()
        if self._connecting is None:
            if loop.time() < self._retry_at_s:  # NOTE: a channel that waits for its next try fails calls at once
                raise self._lost(method, self._failure)
            self._connecting = self._node.spawn(self._network.fabric.loop, self._reach(), f"connect {self.address}")
        self._wire = await asyncio.shield(self._connecting)
        if self._wire is None:
            raise self._lost(method, self._failure)

    async def _reach(self) -> _Wire | None:
        """None: it failed, and `_failure` says why."""
        try:
            return await self._handshake()
        except OSError as error:
            loop = asyncio.get_running_loop()
            self._failure, self._retry_at_s = str(error), loop.time() + self._backoff_s
            self._backoff_s = min(2 * self._backoff_s, _MAX_BACKOFF_S)
            return None
        finally:
            self._connecting = None

    async def _handshake(self) -> _Wire:
        """Raises OSError: there is nobody, or no answer within `CONNECT_TIMEOUT_S`."""
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
                return _Wire(network.fabric, self._node, listener)
            await asyncio.sleep(0.5)
        raise ConnectionError("connecting timed out")

    def _error_of(self, method: Method[Any, Any], answer: Ending | str) -> TandemError:
        if isinstance(answer, str):
            return self._closed(method) if self._is_closed else self._lost(method, answer)
        error = error_of_ending(answer, self.address, method.name)
        return error or self._lost(method, "it ended without an answer")

    def _read(self, form: Form[A], data: bytes) -> A:
        try:
            return form.decode(data)
        except InvalidRequestError as error:
            raise WorkerLostError(f"{self.address} answered nonsense: {error}") from error

    def _require_open(self, method: Method[Any, Any]) -> None:
        if self._is_closed:
            raise self._closed(method)

    def _closed(self, method: Method[Any, Any]) -> TandemError:
        return WorkerLostError(f"{method.name} at {self.address}: this side has closed the connection")

    def _lost(self, method: Method[Any, Any], why: str) -> TandemError:
        return WorkerLostError(f"{method.name} at {self.address} was lost (UNAVAILABLE): {why}")


async def _write_all(method: Method[Any, A], call: _Served, answers: AsyncIterator[A]) -> None:
    try:
        async for answer in answers:
            call.write(method.encode_answer(answer))
            await call.room()
    finally:
        close = getattr(answers, "aclose", None)
        if close is not None:
            await close()


async def _read_all(form: Form[Q], call: _Served) -> AsyncIterator[Q]:
    while isinstance(data := await call.requests.take(), bytes):
        yield form.decode(data)
