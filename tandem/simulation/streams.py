"""Simulated TCP streams between nodes, for code that opens connections with `asyncio` itself: redis-py and health
probes.

Bytes arrive complete and in order until one end closes; the other end notices after all bytes before that.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from tandem.simulation.fabric import Fabric, Pipe, SimulatedConnection, connect_delays
from tandem.simulation.node import Node, current_node

_RETRY_S = 0.5  # between two attempts to connect
_GIVE_UP_S = 20.0  # until an attempt to connect fails

ProtocolFactory = Callable[[], asyncio.BaseProtocol]


@dataclass(frozen=True, slots=True)
class StreamListener:
    """A listener at an address. `accepts`: returns whether connections are accepted now; else they are refused."""

    node: Node
    factory: Callable[[], asyncio.Protocol]
    accepts: Callable[[], bool] = lambda: True


class Streams:
    """The streams of all nodes. `listeners`: by host:port."""

    def __init__(self, fabric: Fabric) -> None:
        self.listeners: dict[str, StreamListener] = {}
        self._fabric = fabric

    async def connect(
        self, factory: ProtocolFactory, host: str, port: int
    ) -> tuple[asyncio.Transport, asyncio.BaseProtocol]:
        """Connects the calling node, as `loop.create_connection`.

        Raises:
            OSError: nothing listens there, or nothing answers.
        """
        node, loop = current_node.get(), self._fabric.loop
        assert node is not None
        until_s = loop.time() + _GIVE_UP_S
        while loop.time() < until_s:
            await connect_delays(self._fabric)
            listener = self.listeners.get(f"{host}:{port}")
            if listener is None or listener.node.is_dead:
                raise ConnectionRefusedError(f"connection to {host}:{port} refused")
            if self._fabric.can_talk(node.name, listener.node.name) and not listener.node.is_paused:
                if not listener.accepts():
                    raise ConnectionRefusedError(f"connection to {host}:{port} refused")
                return self._connected(node, factory(), listener)
            await asyncio.sleep(_RETRY_S)
        raise TimeoutError(f"connecting to {host}:{port} timed out")

    def cut_from(self, name: str) -> None:
        """Ends all streams of the node `name`, as a process that dies does."""
        for connection in [one for one in self._fabric.connections if name in one.names]:
            self._fabric.cut(connection, "connection reset by peer")

    def _connected(
        self, node: Node, protocol: asyncio.BaseProtocol, listener: StreamListener
    ) -> tuple[asyncio.Transport, asyncio.BaseProtocol]:
        fabric = self._fabric
        up, down = Pipe(fabric, node, listener.node), Pipe(fabric, listener.node, node)
        connection = SimulatedConnection(up, down, lambda why: client.lose(why), lambda why: server.lose(why))
        client = _StreamEnd(fabric, connection, up, protocol)
        server = _StreamEnd(fabric, connection, down, listener.node.context.copy().run(listener.factory))
        client.peer, server.peer = server, client
        fabric.connections.append(connection)
        protocol.connection_made(client)
        up.send(partial(server.protocol.connection_made, server))
        return client, protocol


class _StreamEnd(asyncio.Transport):
    """One end of a stream."""

    peer: "_StreamEnd"

    def __init__(
        self, fabric: Fabric, connection: SimulatedConnection, pipe: Pipe, protocol: asyncio.BaseProtocol
    ) -> None:
        super().__init__()
        self.protocol = protocol
        self._fabric, self._connection, self._pipe = fabric, connection, pipe
        self._is_closing = self._is_lost = False

    def write(self, data: Any) -> None:
        if not self._is_closing:
            self._pipe.send(partial(self.peer.take, bytes(data)))

    def is_closing(self) -> bool:
        return self._is_closing

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self.protocol

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._pipe.send(self.peer.end)
            self._fabric.loop.call_soon(self.lose, None, context=self._pipe.source.context)

    def abort(self) -> None:
        self.close()

    def take(self, data: bytes) -> None:
        """Receives bytes."""
        if not self._is_closing:
            assert isinstance(self.protocol, asyncio.Protocol | asyncio.StreamReaderProtocol)
            self.protocol.data_received(data)

    def end(self) -> None:
        """Handles that the other end has closed. NOTE: this end closes too, since no protocol here writes after
        that.
        """
        self._fabric.cut(self._connection, "closed")

    def lose(self, why: str | None) -> None:
        """Ends the stream at this end; `why`: None = it has closed it itself."""
        if self._is_lost:
            return
        self._is_closing = self._is_lost = True
        self.protocol.connection_lost(None if why in (None, "closed") else ConnectionResetError(why))
