"""Redis in memory: the protocol of its connections, and the scripts of discovery in place of Lua.

A failover promotes a replica that lacks the last writes, and ends every connection. The contract of `Discovery` holds
these scripts equal to what Redis does.
"""

import asyncio
import re
from collections.abc import Callable, Sequence

from tandem.locality.embedded import EmbeddedIndex
from tandem.process import discovery_redis
from tandem.simulation.store import STORE

REDIS_ADDRESS = f"{STORE}:6379"
_WRITES = (discovery_redis.ANNOUNCE.encode(), discovery_redis.WITHDRAW.encode())
_Reply = bytes | int | Sequence["_Reply"] | None
_LISTED = re.compile(rb"(\d+)\|")
_ENTRY = re.compile(rb"\d+\|[0-9a-fA-F]+\|(.*)", re.DOTALL)


class SimulatedRedis:
    """One server. `is_down`: it takes no connections. `is_full`: its disk is, so it takes no writes. `clock_offset_s`:
    by which its clock is wrong.

    Args:
        wall_s: seconds since the epoch.

    `index`: of blocks; a replica has an empty one.
    """

    def __init__(self, wall_s: Callable[[], float]) -> None:
        self._wall_s = wall_s
        self.is_down = self.is_full = False
        self.clock_offset_s = 0.0
        self.index = EmbeddedIndex()
        self._entries: dict[bytes, bytes] = {}
        self._expires_ms = 0
        self._writes: list[tuple[float, int, list[bytes]]] = []
        self._scripts: dict[bytes, Callable[[int, list[bytes]], _Reply]] = {
            discovery_redis.ANNOUNCE.encode(): self._announce,
            discovery_redis.WITHDRAW.encode(): self._withdraw,
            discovery_redis.WORKERS.encode(): self._workers,
        }

    def session(self) -> "RedisSession":
        """The server's end of a new connection."""
        return RedisSession(self)

    def run(self, command: list[bytes]) -> bytes:
        """The answer to one command, as it is sent."""
        match command[0].upper(), *command[1:]:
            case b"HELLO", *_:
                return _encoded({b"server": b"redis", b"proto": 3})
            case b"PING", *_:
                return b"+PONG\r\n"
            case b"TIME", *_:
                seconds, milliseconds = divmod(self._now_ms, 1000)
                return _encoded([b"%d" % seconds, b"%d" % (milliseconds * 1000)])
            case b"EVAL", script, *_ if self.is_full and script in _WRITES:
                return b"-MISCONF Errors writing to the AOF file: No space left on device\r\n"
            case b"EVAL", script, b"1", _, *arguments if script in self._scripts:
                self._writes.append((self._wall_s(), self._now_ms, [script, *arguments]))
                return _encoded(self._scripts[script](self._now_ms, arguments))
            case _:
                return b"-ERR unknown command\r\n"

    def fail_over(self, lag_s: float) -> None:
        """The replica takes over, without the writes of the last `lag_s`."""
        kept_until_s = self._wall_s() - lag_s
        self._entries, self._expires_ms = {}, 0
        self.index = EmbeddedIndex()
        self._writes = [write for write in self._writes if write[0] < kept_until_s]
        for _, now_ms, (script, *arguments) in self._writes:
            self._scripts[script](now_ms, arguments)

    @property
    def _now_ms(self) -> int:
        return int((self._wall_s() + self.clock_offset_s) * 1000)

    def _announce(self, now_ms: int, arguments: list[bytes]) -> _Reply:
        self._expire(now_ms)
        name, entry, ttl_ms = arguments
        self._entries[name] = entry
        self._expires_ms = now_ms + int(ttl_ms)
        return 1

    def _withdraw(self, now_ms: int, arguments: list[bytes]) -> _Reply:
        self._expire(now_ms)
        name, record = arguments
        found = _ENTRY.fullmatch(self._entries.get(name, b""))
        if found is not None and found[1] == record:
            del self._entries[name]
        return None

    def _workers(self, now_ms: int, arguments: list[bytes]) -> _Reply:
        self._expire(now_ms)
        (ttl_ms,) = arguments
        found: list[_Reply] = []
        for name, entry in list(self._entries.items()):
            until = _LISTED.match(entry)
            if until is None:
                found += [name, b""]
                del self._entries[name]
            elif not now_ms < int(until[1]) <= now_ms + int(ttl_ms):
                del self._entries[name]
            else:
                found += [name, entry]
        return found

    def _expire(self, now_ms: int) -> None:
        if now_ms >= self._expires_ms:
            self._entries.clear()


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
            self._transport.write(self._server.run(command))


def _taken(received: bytearray) -> list[bytes] | None:
    """The first command in `received`, which is taken out of it; None = it has not come whole yet."""
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


def _encoded(reply: _Reply | dict[bytes, bytes | int]) -> bytes:
    match reply:
        case None:
            return b"_\r\n"
        case int():
            return b":%d\r\n" % reply
        case bytes():
            return b"$%d\r\n%b\r\n" % (len(reply), reply)
        case dict():
            return b"%%%d\r\n" % len(reply) + b"".join(_encoded(part) for pair in reply.items() for part in pair)
        case _:
            return b"*%d\r\n" % len(reply) + b"".join(map(_encoded, reply))
