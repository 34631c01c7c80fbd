"""Simulated Redis: the protocol on its connections, Tandem's own Lua scripts, and failover to a replica.

A failover promotes a replica that lacks the last writes and knows no scripts, and ends every connection.
"""

import asyncio
from collections.abc import Callable, Sequence

from tandem.simulation.redis_data import RedisData, RedisReplyError, Reply, SimpleString
from tandem.simulation.redis_scripts import Scripts, digest_of

STORE = "store"
REDIS_ADDRESS = f"{STORE}:6379"
_BEFORE_ALL_S = float("-inf")


class SimulatedRedis:
    """One server. `is_down`: accepts no connections. `is_full`: its disk is full, so it refuses writes.
    `clock_offset_s`: error of its clock.

    Args:
        wall_s: seconds since the epoch.

    `num_failovers`: so far.
    """

    def __init__(self, wall_s: Callable[[], float]) -> None:
        self._wall_s = wall_s
        self.is_down = self.is_full = False
        self.clock_offset_s = 0.0
        self.num_failovers = 0
        self.data = RedisData()
        self._at_ms = 0
        self._scripts = Scripts(self._call)
        self._known: dict[bytes, bytes] = {}
        self._commands: list[tuple[float, int, tuple[bytes, ...]]] = []

    def session(self) -> "RedisSession":
        """The server's end of a new connection."""
        return RedisSession(self)

    def load(self, *command: bytes) -> None:
        """Run a command that survives every failover."""
        self._run(self._now_ms, command)
        self._commands.append((_BEFORE_ALL_S, self._now_ms, command))

    def run(self, *command: bytes) -> Reply:
        """Run one command; returns its reply.

        Raises:
            RedisReplyError: an error.
        """
        match command[0].upper(), *command[1:]:
            case (b"PING",):
                return SimpleString(b"PONG")
            case b"INFO", b"server":
                return b"run_id:%040d\r\n" % self.num_failovers
            case b"SCRIPT", b"LOAD", script:
                self._known[digest_of(script)] = script
                return digest_of(script)
            case b"EVALSHA", digest, *rest if digest in self._known:
                return self.run(b"EVAL", self._known[digest], *rest)
            case b"EVALSHA", *_:
                raise RedisReplyError("NOSCRIPT No matching script. Please use EVAL.")
            case _:
                reply = self._run(self._now_ms, command)
                self._commands.append((self._wall_s(), self._now_ms, command))
                return reply

    def fail_over(self, lag_s: float) -> None:
        """Promote the replica, which lacks the writes of the last `lag_s`."""
        kept_until_s = self._wall_s() - lag_s
        self.num_failovers += 1
        self.data, self._known = RedisData(), {}
        self._commands = [command for command in self._commands if command[0] < kept_until_s]
        is_full, self.is_full = self.is_full, False
        for _, now_ms, command in self._commands:
            self._run(now_ms, command)
        self.is_full = is_full

    def _run(self, now_ms: int, command: Sequence[bytes]) -> Reply:
        self._at_ms = now_ms
        if command[0].upper() != b"EVAL":
            return self._call(command[0], command[1:])
        _, script, num_keys, *arguments = command
        return self._scripts.run(script, arguments[: int(num_keys)], arguments[int(num_keys) :])

    def _call(self, command: bytes, arguments: Sequence[bytes]) -> Reply:
        return self.data.run(self._at_ms, command, arguments, is_full=self.is_full)

    @property
    def _now_ms(self) -> int:
        return int((self._wall_s() + self.clock_offset_s) * 1000)


class RedisSession(asyncio.Protocol):
    """The server's end of one connection."""

    def __init__(self, server: SimulatedRedis) -> None:
        self._server = server
        self._received = bytearray()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        self._received += data
        while (command := _taken(self._received)) is not None:
            self._transport.write(self._answer(command))

    def _answer(self, command: list[bytes]) -> bytes:
        if command[0].upper() == b"HELLO":
            return b"%2\r\n" + b"".join(_encoded(part) for part in (b"server", b"redis", b"proto", 3))
        try:
            reply = self._server.run(*command)
            return _map_of(reply) if command[0].upper() == b"HGETALL" else _encoded(reply)
        except RedisReplyError as error:
            return b"-%b\r\n" % str(error).encode()


def _taken(received: bytearray) -> list[bytes] | None:
    """Removes the first command from `received` and returns it; None = it has not arrived completely."""
    head, found, rest = received.partition(b"\r\n")
    if not found:
        return None
    words: list[bytes] = []
    for _ in range(int(head.removeprefix(b"*"))):
        size, found, rest = rest.partition(b"\r\n")
        end = int(size.removeprefix(b"$")) if found else 0
        if not found or len(rest) < end + 2:
            return None
        words.append(bytes(rest[:end]))
        rest = rest[end + 2 :]
    received[:] = rest
    return words


def _map_of(reply: Reply) -> bytes:
    assert isinstance(reply, list)
    return b"%%%d\r\n" % (len(reply) // 2) + b"".join(_encoded(part) for part in reply)


def _encoded(reply: Reply) -> bytes:
    match reply:
        case None:
            return b"_\r\n"
        case int():
            return b":%d\r\n" % reply
        case bytes():
            return b"$%d\r\n%b\r\n" % (len(reply), reply)
        case SimpleString(text):
            return b"+%b\r\n" % text
        case _:
            return b"*%d\r\n" % len(reply) + b"".join(map(_encoded, reply))
