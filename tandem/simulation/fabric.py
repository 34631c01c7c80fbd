"""Simulated network between nodes: delays, loss and partitions, and when each end notices that a connection was cut.

As with TCP, a connection keeps order and loses nothing while it is alive: messages during a partition wait and arrive
after it heals, unless keepalive has ended the connection by then. A partition may be one-way.
"""

import asyncio
import hashlib
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from tandem.rpc.channel import KEEPALIVE_S, KEEPALIVE_TIMEOUT_S
from tandem.simulation.loop import VirtualLoop
from tandem.simulation.node import Node

CONNECT_TIMEOUT_S = 2.0  # for an answer when connecting
WINDOW = 12  # messages under way in one direction; past it the writer waits
_RETRANSMIT_S = (0.05, 0.4)  # range of the time until messages that were held back are sent again


@dataclass(slots=True)
class NetworkConditions:
    """Delays in seconds. A share `slow_share` of the messages take up to `slow_s`, as if lost and sent again."""

    mean_s: float = 4e-4
    slow_share: float = 0.005
    slow_s: float = 0.2
    read_s: float = 0.0  # that a piece of a read takes longer


class EventTrace:
    """Digest of all events of a run, in order. With `keep`, the lines are stored too."""

    def __init__(self, keep: bool = False) -> None:
        self._digest = hashlib.blake2b(digest_size=16)
        self.lines: list[str] | None = [] if keep else None
        self.num_lines = 0

    def note(self, *fields: object) -> None:
        line = " ".join(map(str, fields))
        self.num_lines += 1
        self._digest.update(line.encode() + b"\n")
        if self.lines is not None:
            self.lines.append(line)

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()


class Pipe:
    """One direction of a connection. `is_cut`: nothing arrives any more; `is_lost`: nor does the sender know that."""

    def __init__(self, fabric: "Fabric", source: Node, target: Node) -> None:
        self.source, self.target = source, target
        self.is_cut = self.is_lost = False
        self._fabric = fabric
        self._last_s = 0.0
        self._num_under_way = 0
        self._has_room = asyncio.Event()
        self._held: deque[Callable[[], None]] = deque()

    async def room(self) -> None:
        """Wait until flow control permits more to be sent, or nothing will arrive any more."""
        while self._num_under_way >= WINDOW and not self.is_cut:
            self._has_room.clear()
            await self._has_room.wait()

    def cut(self) -> None:
        """Stop delivery: nothing more arrives."""
        self.is_cut = True
        self._has_room.set()

    def send(self, action: Callable[[], None]) -> None:
        """Send a message: run `action` at the target, in its context."""
        self._num_under_way += 1
        now_s = self._fabric.loop.time()
        self._last_s = max(self._last_s, now_s + self._fabric.delay_s())
        self._fabric.loop.call_at(self._last_s, self._arrive, action, context=self.target.context)

    def release(self) -> None:
        """End a partition: messages held back arrive, in order, after being sent again."""
        if self._held:
            after_s = self._fabric.random.uniform(*_RETRANSMIT_S)
            self._fabric.loop.call_later(after_s, self._arrive_late, context=self.target.context)

    def _arrive(self, action: Callable[[], None]) -> None:
        """NOTE: a message waits behind earlier ones that are held back."""
        if self.is_cut or self.is_lost:
            return
        if self._held or self._is_blocked:
            self._held.append(action)
        else:
            self._take(action)

    def _arrive_late(self) -> None:
        while self._held and not (self.is_cut or self._is_blocked):
            self._take(self._held.popleft())

    def _take(self, action: Callable[[], None]) -> None:
        self._num_under_way -= 1
        if self._num_under_way < WINDOW and not self._has_room.is_set():
            self._fabric.loop.call_soon(self._has_room.set, context=self.source.context)
        action()

    @property
    def _is_blocked(self) -> bool:
        return self._fabric.is_blocked(self.source.name, self.target.name)


@dataclass(eq=False, slots=True)
class SimulatedConnection:
    """Connection of two pipes. `on_lost_*` is called in that end's context when the connection ends, with the reason.

    Args:
        is_over: its client knows that it has ended.
    """

    up: Pipe
    down: Pipe
    on_lost_client: Callable[[str], None]
    on_lost_server: Callable[[str], None]
    is_over: bool = field(default=False)

    @property
    def names(self) -> tuple[str, str]:
        return self.up.source.name, self.up.target.name

    def has(self, node: Node) -> bool:
        return node in (self.up.source, self.up.target)


class Fabric:
    """The network of one simulation.

    Args:
        source: source of random delays.
    """

    def __init__(
        self, loop: VirtualLoop, source: random.Random, trace: EventTrace, conditions: NetworkConditions
    ) -> None:
        self.loop = loop
        self.random = source
        self.trace = trace
        self.conditions = conditions
        self.connections: list[SimulatedConnection] = []
        self.silent: dict[Node, None] = {}  # whose end nobody was told
        self._blocked: dict[tuple[str, str], int] = {}
        self._readable: set[tuple[str, str]] = set()
        self._num_blocks = 0

    def delay_s(self) -> float:
        """Returns the delay of one message."""
        if self.random.random() < self.conditions.slow_share:
            return self.random.uniform(0.1, 1.0) * self.conditions.slow_s
        return 5e-5 + self.random.expovariate(1 / self.conditions.mean_s)

    def is_blocked(self, source: str, target: str) -> bool:
        """Whether messages from `source` to `target` do not arrive."""
        return (source, target) in self._blocked

    def can_talk(self, one: str, other: str) -> bool:
        """Whether messages arrive in both directions."""
        return not (self.is_blocked(one, other) or self.is_blocked(other, one))

    def can_read(self, one: str, other: str) -> bool:
        """Whether blocks can be read between two nodes, which may be possible where calls are blocked."""
        pair = (one, other)
        return self.can_talk(one, other) or pair in self._readable or pair[::-1] in self._readable

    def block(self, source: str, target: str, *, is_readable: bool = False) -> None:
        """Messages from `source` to `target` do not arrive until `heal`; keepalive may end their connections first.

        Args:
            is_readable: blocks can be read all the same.
        """
        self._num_blocks += 1
        if is_readable:
            self._readable.add((source, target))
        number = self._blocked[source, target] = self._num_blocks
        for connection in self.connections:
            if connection.names in ((source, target), (target, source)):
                self._keep_alive(connection, lambda: self._blocked.get((source, target)) == number)

    def heal(self, source: str, target: str) -> None:
        """End what `block` began."""
        if self._blocked.pop((source, target), None) is None:
            return
        self._readable.discard((source, target))
        for connection in self.connections:
            for pipe in (connection.up, connection.down):
                if (pipe.source.name, pipe.target.name) == (source, target):
                    pipe.release()

    def crash(self, node: Node, *, is_silent: bool) -> None:
        """Records that `node` has died. Silent: its host died too, so peers notice by their keepalive only."""
        if is_silent:
            self.silent[node] = None
        for connection in [one for one in self.connections if one.has(node)]:
            if is_silent:
                self._keep_alive(connection, lambda: True)
            else:
                self.loop.call_later(self.delay_s(), self.cut, connection, "connection reset by peer")

    def come_back(self, name: str, outage_s: float) -> None:
        """Restarts the host of a node: it refuses messages on connections that it does not know."""
        for node in [node for node in self.silent if node.name == name]:
            del self.silent[node]
            for connection in [one for one in self.connections if one.has(node)]:
                # NOTE: each retransmission of TCP waits twice as long: the next is due within as long as it was away
                after_s = self.random.uniform(0.0, outage_s)
                self.loop.call_later(after_s, self.cut, connection, "connection reset by peer")

    def half_open(self, told: str, other: str) -> None:
        """End the connections between two nodes, as where a firewall forgets them. Only one node is told; the other
        notices by its keepalive, and what either sends on them is lost.
        """
        for connection in [one for one in self.connections if set(one.names) == {told, other}]:
            connection.up.is_lost = connection.down.is_lost = True
            if connection.up.source.name == told:
                node, on_lost = connection.up.source, connection.on_lost_client
                connection.is_over, connection.on_lost_client = True, _hear_nothing
            else:
                node, on_lost = connection.up.target, connection.on_lost_server
                connection.on_lost_server = _hear_nothing
            self.loop.call_soon(on_lost, "connection reset by peer", context=node.context)
            self._keep_alive(connection, lambda: True)

    def cut(self, connection: SimulatedConnection, why: str) -> None:
        """End a connection and notify both ends."""
        if connection not in self.connections:
            return
        connection.is_over = True
        connection.up.cut()
        connection.down.cut()
        self.connections.remove(connection)
        client, server = connection.up.source, connection.up.target
        self.trace.note(f"{self.loop.time():.9f}", "cut", *connection.names, why)
        self.loop.call_soon(connection.on_lost_client, why, context=client.context)
        self.loop.call_soon(connection.on_lost_server, why, context=server.context)

    def _keep_alive(self, connection: SimulatedConnection, still: Callable[[], bool]) -> None:
        """End a connection if a ping is not answered in time."""
        after_s = self.random.uniform(KEEPALIVE_TIMEOUT_S, KEEPALIVE_S + KEEPALIVE_TIMEOUT_S)

        def check() -> None:
            if still():
                self.cut(connection, "keepalive watchdog timeout")

        self.loop.call_later(after_s, check, context=self.loop.world.context)


def _hear_nothing(_: str) -> None:
    """Callback of a connection's end that already knows it has ended."""


async def connect_delays(fabric: Fabric) -> None:
    """Waits for one round trip."""
    await asyncio.sleep(fabric.delay_s() + fabric.delay_s())
