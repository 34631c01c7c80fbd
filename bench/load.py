"""Foreign load: processor time that others used during a measurement, reported with each row."""

import os
import time
from contextlib import suppress
from pathlib import Path

import psutil


class ForeignLoad:
    """Mean number of cores that others kept busy since construction: processes that we did not start, and other virtual
    machines on the same cores as far as the kernel is told (steal).
    """

    def __init__(self) -> None:
        self._started_s = time.perf_counter()
        self._busy_s = _busy_s()
        self._own_s = _own_s()

    def cores(self) -> float:
        elapsed_s = time.perf_counter() - self._started_s
        foreign_s = (_busy_s() - self._busy_s) - (_own_s() - self._own_s)
        return max(0.0, foreign_s / elapsed_s)


def prioritise() -> None:
    """Ask the scheduler to prefer this process's session over others', where it groups sessions and lets us."""
    with suppress(OSError):
        os.setsid()
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text("-10")


def _busy_s() -> float:
    times = psutil.cpu_times()
    return float(times.user + times.system + times.nice + getattr(times, "steal", 0.0))


def _own_s() -> float:
    """Of this process and everything it has started."""
    total_s = 0.0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with suppress(psutil.Error):
            times = process.cpu_times()
            total_s += times.user + times.system
    return total_s
