"""Runs Lua scripts for the simulated Redis, with the same release of Lua as in Redis.

A script that fails raises `RedisReplyError`, which the server sends as an error reply; its earlier writes stay.
"""

import json
from collections.abc import Callable, Sequence
from hashlib import sha1
from typing import Any

from lupa.lua51 import LuaError, LuaRuntime  # type: ignore[import-untyped]

from tandem.simulation.redis_data import RedisReplyError, Reply, SimpleString

_NUMBER = b">I4"
Call = Callable[[bytes, Sequence[bytes]], Reply]  # runs one command, given its name and arguments


def digest_of(script: bytes) -> bytes:
    """The name by which EVALSHA calls a script."""
    return sha1(script).hexdigest().encode()  # NOTE: Redis' choice


class Scripts:
    """Runs scripts, whose `redis.call` and `redis.pcall` call `call`, in the same thread."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._lua: Any = LuaRuntime(encoding=None)
        self._compiled: dict[bytes, Any] = {}
        table, self._globals = self._lua.table_from, self._lua.globals()
        self._globals[b"redis"] = table({b"call": self._called, b"pcall": self._tried})
        self._globals[b"struct"] = table({b"pack": _packed, b"unpack": _unpacked})
        self._globals[b"cjson"] = table({b"encode": _json_of, b"decode": self._of_json})

    def run(self, script: bytes, keys: Sequence[bytes], arguments: Sequence[bytes]) -> Reply:
        """Runs a script and returns its reply; raises `RedisReplyError` if a command or the script itself fails."""
        if script not in self._compiled:
            self._compiled[script] = self._lua.compile(script)
        self._globals[b"KEYS"] = self._lua.table_from(list(keys))
        self._globals[b"ARGV"] = self._lua.table_from(list(arguments))
        try:
            return _reply_of(self._compiled[script]())
        except LuaError as error:
            raise RedisReplyError(f"ERR Error running script: {error}") from error

    def _called(self, command: bytes, *arguments: bytes | float) -> Any:
        return self._value_of(self._call(command, [_written(argument) for argument in arguments]))

    def _tried(self, command: bytes, *arguments: bytes | float) -> Any:
        try:
            return self._called(command, *arguments)
        except RedisReplyError as error:
            return self._lua.table_from({b"err": str(error).encode()})

    def _value_of(self, reply: Reply) -> Any:
        match reply:
            case None:
                return False  # NOTE: as Redis gives Lua what is not there
            case bytes() | int():
                return reply
            case SimpleString(text):
                return self._lua.table_from({b"ok": text})
            case _:
                return self._lua.table_from([self._value_of(part) for part in reply])

    def _of_json(self, text: bytes) -> Any:
        return self._lua.table_from({name.encode(): value.encode() for name, value in json.loads(text).items()})


def _json_of(table: Any) -> bytes:
    """NOTE: what is no UTF-8 stays as it is, as in Redis."""
    names = {name.decode(errors="surrogateescape"): _plain(value) for name, value in table.items()}
    return json.dumps(names, ensure_ascii=False).encode(errors="surrogateescape")


def _plain(value: bytes | float) -> str | float:
    return value.decode() if isinstance(value, bytes) else value


def _packed(form: bytes, number: int) -> bytes:
    assert form == _NUMBER, form
    return int(number).to_bytes(4, "big")


def _unpacked(form: bytes, data: bytes) -> int:
    assert form == _NUMBER, form
    return int.from_bytes(data[:4], "big")


def _written(argument: bytes | float) -> bytes:
    return argument if isinstance(argument, bytes) else b"%.17g" % argument


def _reply_of(value: Any) -> Reply:
    match value:
        case None | False:
            return None
        case bytes():
            return value
        case int() | float():
            return int(value)  # NOTE: True is 1
        case _:
            parts: list[Reply] = []
            while value[len(parts) + 1] is not None:
                parts.append(_reply_of(value[len(parts) + 1]))
            return parts
