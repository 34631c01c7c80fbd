"""Data of a simulated Redis: the commands that scripts and clients of Tandem use, on values in memory.

The contracts of discovery, of accounts and of the locality index hold them equal to what Redis does.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SimpleString:
    """A reply of type simple string."""

    text: bytes


Reply = bytes | int | SimpleString | Sequence["Reply"] | None
OK = SimpleString(b"OK")


class RedisReplyError(Exception):
    """A reply that is an error. Its message begins with Redis' code."""


class _Hash(dict[bytes, bytes]):
    """Fields with their values."""


class _SortedSet(dict[bytes, float]):
    """Members with their scores."""


class _Set(set[bytes]):
    """Members."""


@dataclass(slots=True)
class _Stream:
    entries: OrderedDict[bytes, list[bytes]] = field(default_factory=OrderedDict)
    last: tuple[int, int] = (0, 0)


_KINDS = {bytes: b"string", _Hash: b"hash", _SortedSet: b"zset", _Set: b"set", _Stream: b"stream"}


class RedisData:
    """Keys with their values, each until its time to live is over. `_name` implements the command NAME."""

    def __init__(self) -> None:
        self._values: dict[bytes, object] = {}
        self._ends_ms: dict[bytes, int] = {}
        self._now_ms = 0

    def run(self, now_ms: int, command: bytes, arguments: Sequence[bytes], *, is_full: bool = False) -> Reply:
        """Run a command at the time `now_ms`; returns its reply. `is_full`: the disk is full, so writes are refused.

        Raises:
            RedisReplyError: the command is not one of these, does not fit the value, or cannot be written.
        """
        name = command.upper()
        if name not in _COMMANDS:
            raise RedisReplyError(f"ERR unknown command {name!r}")
        if is_full and name not in _READS:
            raise RedisReplyError("MISCONF Errors writing to the AOF file: No space left on device")
        self._now_ms = now_ms
        return _COMMANDS[name](self, *arguments)

    def stream(self, key: bytes) -> Sequence[tuple[bytes, Sequence[bytes]]]:
        """Entries of a stream in order: the id, then fields and values alternating."""
        found = self._find(key, _Stream)
        return [] if found is None else list(found.entries.items())

    def _find(self, key: bytes, kind: type[T]) -> T | None:
        if key in self._ends_ms and self._ends_ms[key] <= self._now_ms:
            self._del(key)
        value = self._values.get(key)
        if value is not None and not isinstance(value, kind):
            raise RedisReplyError("WRONGTYPE Operation against a key holding the wrong kind of value")
        return value

    def _open(self, key: bytes, kind: type[T]) -> T:
        value = self._find(key, kind)
        if value is None:
            self._values[key] = value = kind()
        return value

    def _removed(self, key: bytes, kind: type[_Hash] | type[_SortedSet], names: Sequence[bytes]) -> int:
        """Removes members; returns how many there were. NOTE: a key is deleted with its last member."""
        value = self._find(key, kind)
        if value is None:
            return 0
        num_removed = sum(value.pop(name, None) is not None for name in names)
        if not value:
            self._del(key)
        return num_removed

    # Of keys.

    def _type(self, key: bytes) -> Reply:
        value = self._find(key, object)
        return SimpleString(b"none" if value is None else _KINDS[type(value)])

    def _exists(self, key: bytes) -> Reply:
        return int(self._find(key, object) is not None)

    def _del(self, key: bytes) -> Reply:
        self._ends_ms.pop(key, None)
        return int(self._values.pop(key, None) is not None)

    def _unlink(self, *keys: bytes) -> Reply:
        return sum(bool(self._del(key)) for key in keys)

    def _flushall(self) -> Reply:
        self._values.clear()
        self._ends_ms.clear()
        return OK

    def _rename(self, key: bytes, name: bytes) -> Reply:
        if self._find(key, object) is None:
            raise RedisReplyError("ERR no such key")
        self._del(name)
        self._values[name] = self._values.pop(key)
        if key in self._ends_ms:
            self._ends_ms[name] = self._ends_ms.pop(key)
        return OK

    def _pttl(self, key: bytes) -> Reply:
        if self._find(key, object) is None:
            return -2
        return self._ends_ms[key] - self._now_ms if key in self._ends_ms else -1

    def _expire(self, key: bytes, seconds: bytes) -> Reply:
        return self._pexpire(key, b"%d" % (1000 * int(seconds)))

    def _pexpire(self, key: bytes, milliseconds: bytes) -> Reply:
        if self._find(key, object) is None:
            return 0
        self._ends_ms[key] = self._now_ms + int(milliseconds)
        return 1

    def _time(self) -> Reply:
        seconds, milliseconds = divmod(self._now_ms, 1000)
        return [b"%d" % seconds, b"%d" % (1000 * milliseconds)]

    # Of strings.

    def _get(self, key: bytes) -> Reply:
        return self._find(key, bytes)

    def _set(self, key: bytes, value: bytes, px: bytes, milliseconds: bytes) -> Reply:
        assert px.upper() == b"PX", px
        self._values[key] = value
        self._ends_ms[key] = self._now_ms + int(milliseconds)
        return OK

    # Of hashes.

    def _hset(self, key: bytes, *pairs: bytes) -> Reply:
        value = self._open(key, _Hash)
        num_before = len(value)
        value.update(zip(pairs[::2], pairs[1::2], strict=True))
        return len(value) - num_before

    def _hget(self, key: bytes, name: bytes) -> Reply:
        return (self._find(key, _Hash) or _Hash()).get(name)

    def _hmget(self, key: bytes, *names: bytes) -> Reply:
        return [self._hget(key, name) for name in names]

    def _hvals(self, key: bytes) -> Reply:
        return list((self._find(key, _Hash) or _Hash()).values())

    def _hgetall(self, key: bytes) -> Reply:
        return [part for pair in (self._find(key, _Hash) or _Hash()).items() for part in pair]

    def _hlen(self, key: bytes) -> Reply:
        return len(self._find(key, _Hash) or ())

    def _hexists(self, key: bytes, name: bytes) -> Reply:
        return int(name in (self._find(key, _Hash) or {}))

    def _hincrby(self, key: bytes, name: bytes, amount: bytes) -> Reply:
        value = self._open(key, _Hash)
        total = int(value.get(name, b"0")) + int(amount)
        value[name] = b"%d" % total
        return total

    def _hdel(self, key: bytes, *names: bytes) -> Reply:
        return self._removed(key, _Hash, names)

    # Of sets.

    def _sadd(self, key: bytes, member: bytes) -> Reply:
        value = self._open(key, _Set)
        is_new = member not in value
        value.add(member)
        return int(is_new)

    def _sismember(self, key: bytes, member: bytes) -> Reply:
        return int(member in (self._find(key, _Set) or ()))

    def _zadd(self, key: bytes, *given: bytes) -> Reply:
        *options, score, member = given
        assert options in ([], [b"GT"]), options
        value = self._open(key, _SortedSet)
        is_new = member not in value
        if is_new or not options or float(score) > value[member]:
            value[member] = float(score)
        return int(is_new)

    def _zcard(self, key: bytes) -> Reply:
        return len(self._find(key, _SortedSet) or ())

    def _zrange(self, key: bytes, start: bytes, end: bytes) -> Reply:
        assert (start, end) == (b"0", b"-1"), (start, end)
        return self._zrangebyscore(key, b"-inf", b"inf")

    def _zrangebyscore(self, key: bytes, least: bytes, most: bytes, *limit: bytes) -> Reply:
        value = self._find(key, _SortedSet) or _SortedSet()
        among = sorted((score, member) for member, score in value.items() if float(least) <= score <= float(most))
        start, count = (int(number) for number in limit[1:]) if limit else (0, len(among))
        return [member for _, member in among[start : start + count]]

    def _zrem(self, key: bytes, *members: bytes) -> Reply:
        return self._removed(key, _SortedSet, members)

    # Of streams.

    def _xadd(self, key: bytes, maxlen: bytes, about: bytes, most: bytes, number: bytes, *pairs: bytes) -> Reply:
        assert (maxlen.upper(), about, number) == (b"MAXLEN", b"~", b"*"), (maxlen, about, number)
        value = self._open(key, _Stream)
        value.last = max((self._now_ms, 0), (value.last[0], value.last[1] + 1))
        entry = b"%d-%d" % value.last
        value.entries[entry] = list(pairs)
        while len(value.entries) > int(most):
            value.entries.popitem(last=False)
        return entry

    def _xrevrange(self, key: bytes, end: bytes, start: bytes, count: bytes, most: bytes) -> Reply:
        assert (start, count.upper()) == (b"-", b"COUNT"), (start, count)
        assert end == b"+" or end.startswith(b"("), end
        newest = self.stream(key)[::-1]
        begin = 0 if end == b"+" else [number for number, _ in newest].index(end[1:]) + 1
        return [[number, list(pairs)] for number, pairs in newest[begin : begin + int(most)]]

    def _xdel(self, key: bytes, number: bytes) -> Reply:
        value = self._find(key, _Stream)
        return int(value is not None and value.entries.pop(number, None) is not None)


_COMMANDS: Mapping[bytes, Callable[..., Reply]] = {
    name.removeprefix("_").upper().encode(): getattr(RedisData, name)
    for name in (
        *("_type", "_exists", "_del", "_unlink", "_flushall", "_rename", "_expire", "_pexpire", "_pttl", "_time"),
        *("_get", "_set"),
        *("_hset", "_hget", "_hmget", "_hvals", "_hgetall", "_hlen", "_hexists", "_hincrby", "_hdel"),
        *("_sadd", "_sismember", "_zadd", "_zcard", "_zrange", "_zrangebyscore", "_zrem"),
        *("_xadd", "_xrevrange", "_xdel"),
    )
}
_READS = frozenset(
    b"TYPE EXISTS PTTL TIME GET HGET HMGET HVALS HGETALL HLEN HEXISTS SISMEMBER ZCARD ZRANGE ZRANGEBYSCORE "
    b"XREVRANGE".split()
)
