"""Connections of redis-py's blocking client to the simulated Redis, for code that calls it from a thread.

Such code runs as a thread job of `loop.VirtualLoop`, in one event: it never really waits, and the time that a request
and its reply take is added to the job's virtual duration. Faults that cut a node's connections cut these too.
"""

import asyncio
import errno
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any

from redis.connection import Connection

from tandem.simulation.fabric import Fabric, Pipe, SimulatedConnection
from tandem.simulation.loop import VirtualLoop
from tandem.simulation.node import Node
from tandem.simulation.redis import REDIS_ADDRESS
from tandem.simulation.streams import StreamListener, Streams


def connection_class(fabric: Fabric, streams: Streams, node: Node) -> type[Connection]:
    """Returns a class of connections from this node, for redis-py."""

    class SimulatedBlockingConnection(Connection):
        def _connect(self) -> Any:
            return BlockingSocket(fabric, node, streams.listeners[REDIS_ADDRESS], self.socket_connect_timeout or 0.0)

    return SimulatedBlockingConnection


class BlockingSocket:
    """Client's end of a connection, with the socket methods that redis-py uses. Data is delivered when its answer is
    read.

    Raises:
        OSError: nothing listens there, or nothing answers within `timeout_s`.
    """

    def __init__(self, fabric: Fabric, node: Node, listener: StreamListener, timeout_s: float) -> None:
        self._fabric, self._node, self._server, self._timeout_s = fabric, node, listener.node, timeout_s
        self._unsent = bytearray()
        self._received = bytearray()
        self._is_lost = False
        self._pass(fabric.delay_s() + fabric.delay_s(), is_through=fabric.can_talk(node.name, listener.node.name))
        if not listener.accepts():
            raise ConnectionRefusedError("connection refused")
        up, down = Pipe(fabric, node, self._server), Pipe(fabric, self._server, node)
        self._connection = SimulatedConnection(up, down, self._lose, lambda _: None)
        fabric.connections.append(self._connection)
        self._session = self._at_server(listener.factory)
        self._at_server(partial(self._session.connection_made, _Replies(self._received)))

    def settimeout(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    def sendall(self, data: bytes) -> None:
        if self._is_over:
            raise ConnectionResetError(errno.ECONNRESET, "connection reset by peer")
        self._unsent += data

    def recv(self, num_bytes: int) -> bytes:
        """Returns bytes that have arrived; b"" = the other end has closed."""
        if not (self._received or self._is_over):
            if not self._timeout_s:
                raise BlockingIOError(errno.EWOULDBLOCK, "nothing has come")
            self._exchange()
        taken = bytes(self._received[:num_bytes])
        del self._received[:num_bytes]
        return taken

    def shutdown(self, how: int) -> None:
        """No effect: `close` follows."""

    def close(self) -> None:
        self._lose("closed")
        if self._connection in self._fabric.connections:
            self._fabric.connections.remove(self._connection)

    @property
    def _is_over(self) -> bool:
        return self._is_lost or self._connection.is_over

    def _exchange(self) -> None:
        """Delivers what was sent, and receives the answer; either way may be cut without the other."""
        there_s, back_s = self._fabric.delay_s(), self._fabric.delay_s()
        there, back = (self._node.name, self._server.name), (self._server.name, self._node.name)
        data, self._unsent = bytes(self._unsent), bytearray()
        if data and not self._fabric.is_blocked(*there):
            self._at_server(partial(self._session.data_received, data))
        self._pass(there_s + back_s, is_through=bool(self._received) and not self._fabric.is_blocked(*back))

    def _pass(self, seconds: float, *, is_through: bool) -> None:
        if not is_through or seconds > self._timeout_s:
            self._fabric.loop.spend(self._timeout_s)
            raise TimeoutError("timed out")
        self._fabric.loop.spend(seconds)

    def _at_server(self, action: Callable[[], Any]) -> Any:
        return self._server.context.copy().run(action)

    def _lose(self, why: str) -> None:
        self._is_lost = True


class _Replies(asyncio.Transport):
    """Server's end of a connection; what it writes is received by the client."""

    def __init__(self, received: bytearray) -> None:
        super().__init__()
        self._received = received

    def write(self, data: Any) -> None:
        self._received += data


class JobsBeside(Executor):
    """Stands in for the thread by which `locality.redis` renews the keys of long chains after a look-up: each submitted
    call runs as a thread job of the calling node, beside it.
    """

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        done: Future[Any] = Future()
        job = self._loop.run_in_executor(None, partial(fn, *args, **kwargs))
        job.add_done_callback(lambda job: done.set_result(job.result()))
        return done
