"""What a process takes from its machine besides memory: two clocks and random bytes.

The real ones by default. A simulation sets another machine in the context of its tasks, so that several processes can
live in one, each with clocks of its own. Code that keeps a `Clock` is given one; nothing else may ask the system.
"""

import os
import time
from contextvars import ContextVar
from typing import Protocol

_FRACTION_BITS = 53


class Machine(Protocol):
    """Clocks in seconds. `monotonic_s` never goes backwards; `wall_s`, since the epoch, may be set at any time."""

    def monotonic_s(self) -> float: ...

    def wall_s(self) -> float: ...

    def random_bytes(self, num_bytes: int) -> bytes:
        """Bytes that nobody can foresee."""
        ...


class SystemMachine:
    """This machine."""

    def monotonic_s(self) -> float:
        return time.monotonic()

    def wall_s(self) -> float:
        return time.time()

    def random_bytes(self, num_bytes: int) -> bytes:
        return os.urandom(num_bytes)


current_machine: ContextVar[Machine] = ContextVar("current_machine", default=SystemMachine())  # noqa: B039


def monotonic_s() -> float:
    """Seconds of a clock that never goes backwards."""
    return current_machine.get().monotonic_s()


def wall_s() -> float:
    """Seconds since the epoch, as this machine believes."""
    return current_machine.get().wall_s()


def random_bytes(num_bytes: int) -> bytes:
    """Bytes that nobody can foresee."""
    return current_machine.get().random_bytes(num_bytes)


def random_id() -> str:
    """32 hexadecimal digits that name one thing for good."""
    return random_bytes(16).hex()


def random_fraction() -> float:
    """A uniform number in [0, 1)."""
    return (int.from_bytes(random_bytes(8), "little") >> (64 - _FRACTION_BITS)) * 2.0**-_FRACTION_BITS
