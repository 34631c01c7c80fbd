"""Interface to the machine: two clocks, random bytes, and the resources that the process uses.

The real ones by default. A simulation sets another machine in the context of its tasks, so that several processes can
live in one, each with clocks of its own. Code that keeps a `Clock` is given one. The protocols that a simulation
checks ask nothing else; the rest (command line, files of models, threads of transports) may ask the system itself.
"""

import functools
import os
import time
from contextvars import ContextVar
from typing import Protocol

import psutil

_FRACTION_BITS = 53


class Machine(Protocol):
    """Clocks in seconds. `monotonic_s` never goes backwards; `wall_s`, since the epoch, may be set at any time."""

    def monotonic_s(self) -> float: ...

    def wall_s(self) -> float: ...

    def random_bytes(self, num_bytes: int) -> bytes:
        """Bytes that nobody can foresee."""
        ...

    def cpu_s(self) -> float:
        """CPU seconds of this process so far, all threads."""
        ...

    def resident_bytes(self) -> int:
        """Memory of this process, pages that it shares with others included."""
        ...


@functools.cache
def _process_of(pid: int) -> psutil.Process:
    """NOTE: making one takes ten times as long as asking it; by its id, since a fork has another."""
    return psutil.Process(pid)


class SystemMachine:
    """This machine."""

    def monotonic_s(self) -> float:
        return time.monotonic()

    def wall_s(self) -> float:
        return time.time()

    def random_bytes(self, num_bytes: int) -> bytes:
        return os.urandom(num_bytes)

    def cpu_s(self) -> float:
        return time.process_time()

    def resident_bytes(self) -> int:
        return int(_process_of(os.getpid()).memory_info().rss)


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


def cpu_s() -> float:
    """CPU seconds of this process so far, all threads."""
    return current_machine.get().cpu_s()


def resident_bytes() -> int:
    """Memory of this process, pages that it shares with others included."""
    return current_machine.get().resident_bytes()


def random_id() -> str:
    """32 hexadecimal digits that name one thing for good."""
    return random_bytes(16).hex()


def random_fraction() -> float:
    """A uniform number in [0, 1)."""
    return (int.from_bytes(random_bytes(8), "little") >> (64 - _FRACTION_BITS)) * 2.0**-_FRACTION_BITS
