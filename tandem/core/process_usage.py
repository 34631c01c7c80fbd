"""CPU and memory usage of this process, for operators. GPU memory is not included."""

from collections.abc import Callable
from dataclasses import dataclass

from tandem.core import machine
from tandem.core.clock import Clock, SystemClock

MEAN_OVER_S = 1.0  # the shortest time over which CPU use is averaged


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """Current usage of a process.

    Args:
        memory_bytes: resident memory, including pages shared with other processes.
        cpu_cores: mean over the last `MEAN_OVER_S` seconds or more, all threads; None before that.
    """

    memory_bytes: int
    cpu_cores: float | None = None


class UsageMeter:
    """Reads this process's usage. Owned by one thread.

    Args:
        cpu_s: CPU seconds of this process so far.
    """

    def __init__(self, clock: Clock | None = None, cpu_s: Callable[[], float] = machine.cpu_s) -> None:
        self._clock = clock or SystemClock()
        self._cpu_s = cpu_s
        self._since_s, self._since_cpu_s = self._clock.now_s(), cpu_s()
        self._cpu_cores: float | None = None

    def read(self) -> ProcessUsage:
        """Returns the current usage. Takes less than 0.1 ms, so it can be called for every report."""
        now_s = self._clock.now_s()
        if now_s - self._since_s >= MEAN_OVER_S:
            cpu_s = self._cpu_s()
            self._cpu_cores = (cpu_s - self._since_cpu_s) / (now_s - self._since_s)
            self._since_s, self._since_cpu_s = now_s, cpu_s
        return ProcessUsage(machine.resident_bytes(), self._cpu_cores)
