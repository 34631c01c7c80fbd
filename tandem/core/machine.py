"""Interface to the machine: two clocks, random bytes, and the resources that the process uses.

The real machine is the default. A simulation sets another one in the context of its tasks, so that several simulated
processes, each with its own clocks, can run in one process. Simulated code gets time only from a `Clock` argument or
from here; other code (command line, files of models, threads of transports) may ask the system itself.
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
        """Returns unpredictable random bytes."""
        ...

    def process_id(self) -> int:
        """Number that the operating system gave this process."""
        ...

    def cpu_s(self) -> float:
        """CPU seconds of this process so far, all threads."""
        ...

    def resident_bytes(self) -> int:
        """Resident memory of this process, including pages shared with others."""
        ...


@functools.cache
def _process_of(pid: int) -> psutil.Process:
    """NOTE: cached, since creation takes ten times as long as a query; by process id, which changes after a fork."""
    return psutil.Process(pid)


class SystemMachine:
    """This machine."""

    def monotonic_s(self) -> float:
        return time.monotonic()

    def wall_s(self) -> float:
        return time.time()

    def random_bytes(self, num_bytes: int) -> bytes:
        return os.urandom(num_bytes)

    def process_id(self) -> int:
        return os.getpid()

    def cpu_s(self) -> float:
        return time.process_time()

    def resident_bytes(self) -> int:
        return int(_process_of(os.getpid()).memory_info().rss)


current_machine: ContextVar[Machine] = ContextVar("current_machine", default=SystemMachine())  # noqa: B039


def monotonic_s() -> float:
    """Seconds of a clock that never goes backwards."""
    return current_machine.get().monotonic_s()


def wall_s() -> float:
    """Seconds since the epoch by this machine's wall clock."""
    return current_machine.get().wall_s()


def random_bytes(num_bytes: int) -> bytes:
    """Returns unpredictable random bytes."""
    return current_machine.get().random_bytes(num_bytes)


def process_id() -> int:
    """Number that the operating system gave this process."""
    return current_machine.get().process_id()


def cpu_s() -> float:
    """CPU seconds of this process so far, all threads."""
    return current_machine.get().cpu_s()


def resident_bytes() -> int:
    """Resident memory of this process, including pages shared with others."""
    return current_machine.get().resident_bytes()


def random_id() -> str:
    """Returns a unique identifier of 32 hexadecimal digits."""
    return random_bytes(16).hex()


def random_fraction() -> float:
    """Returns a uniform random number in [0, 1)."""
    return (int.from_bytes(random_bytes(8), "little") >> (64 - _FRACTION_BITS)) * 2.0**-_FRACTION_BITS
