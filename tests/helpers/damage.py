"""Seeded damage to files: bits flipped, numbers replaced by extreme ones, parts cut out, doubled or put elsewhere."""

import json
import random
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_NUMBERS = (0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1)
_VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        -1,
        1,
        3,
        2**31,
        2**40,
        2**63,
        2**64,
        10**400,
        1.5,
        -0.0,
        1e308,
        float("nan"),
        float("inf"),
    ),
    *("", "x", "a/../b", "\u0000", "\ud800", "F32", "U8", "BF16", "F4", [], [0], [-1], [1, 2], [2**40, 2**40], {}),
    *({"dtype": "F32"}, [[1]], ["x"]),
)


def damaged(rng: random.Random, content: bytes, end: int) -> bytes:
    """The content with one to three kinds of damage before byte `end`, so that headers are hit more often than data."""
    found = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 3))):
        rng.choice(_DAMAGES)(rng, found, max(1, min(end, len(found))))
    return bytes(found)


def _flip(rng: random.Random, content: bytearray, end: int) -> None:
    content[rng.randrange(end)] ^= 1 << rng.randrange(8)


def _set_number(rng: random.Random, content: bytearray, end: int) -> None:
    size, start = rng.choice((1, 2, 4, 8)), rng.randrange(end)
    value = rng.choice(_NUMBERS) % (1 << 8 * size)
    content[start : start + size] = value.to_bytes(size, "little")


def _cut(rng: random.Random, content: bytearray, end: int) -> None:
    start = rng.randrange(end)
    del content[start : start + rng.choice((1, 8, 100, len(content)))]


def _double(rng: random.Random, content: bytearray, end: int) -> None:
    start, size = rng.randrange(end), rng.choice((1, 8, 50))
    content[start:start] = content[start : start + size]


def _copy(rng: random.Random, content: bytearray, end: int) -> None:
    """A part over another, so that names, counts and offsets are those of others."""
    source, target, size = rng.randrange(end), rng.randrange(end), rng.choice((4, 8, 24))
    part = content[source : source + size]
    content[target : target + len(part)] = part


def _noise(rng: random.Random, content: bytearray, end: int) -> None:
    start, size = rng.randrange(end), rng.choice((2, 16))
    content[start : start + size] = rng.randbytes(size)


_DAMAGES: tuple[Callable[[random.Random, bytearray, int], None], ...] = (
    *(_flip, _set_number, _set_number, _cut, _double, _copy, _noise),
)


def damaged_object(rng: random.Random, content: dict[str, Any]) -> str:
    """JSON of an object in which one to three values, at any depth, are others, lack, or have another name."""
    found = json.loads(json.dumps(content))
    for _ in range(rng.choice((1, 1, 2, 3))):
        places = list(_places(found))
        if not places:
            break
        holder, key = rng.choice(places)
        kind = rng.choice(("value", "value", "value", "gone", "name"))
        if kind == "value":
            holder[key] = rng.choice(_VALUES)
        elif kind == "gone":
            del holder[key]
        elif isinstance(holder, dict):
            name = rng.choice((f"{key}x", "", "a\u0000b", "../x", *holder))
            holder[name] = holder.pop(key)
    return json.dumps(found)


def _places(holder: Any) -> Iterator[tuple[Any, Any]]:
    """Every value of an object or list, as what holds it and where."""
    for key in list(holder) if isinstance(holder, dict) else range(len(holder)):
        yield holder, key
        if isinstance(holder[key], (dict, list)):
            yield from _places(holder[key])


@contextmanager
def little_memory(num_bytes: int) -> Iterator[None]:
    """This process may map so many bytes more, so that a huge allocation is an error in place of a slow machine."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
