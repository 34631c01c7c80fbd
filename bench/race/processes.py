"""What a system's processes cost: processor time and peak memory of whole trees, from /proc.

Memory is proportional (PSS): a page that several processes share counts once. Never touches a process that is not below
the given roots.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

_KIB = 1024
_RESET_PEAK = "5"  # NOTE: to clear_refs: the peak of resident memory starts anew
_PRIORITY = "-10"


class ProcessTrees:
    """The processes at and below `pids`, as they are when asked."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._roots = tuple(pids)

    def cpu_s(self) -> float:
        """Processor time of those that live."""
        total_s = 0.0
        for process in self._living():
            with suppress(psutil.Error):
                times = process.cpu_times()
                total_s += times.user + times.system
        return total_s

    def forget_peaks(self) -> None:
        """From now on peaks count anew, where the kernel lets us."""
        for pid in self.pids():
            with suppress(OSError):
                Path(f"/proc/{pid}/clear_refs").write_text(_RESET_PEAK)

    def peak_bytes(self) -> int:
        """Proportional memory now, and for each process what its resident memory has shrunk by since its peak.

        At most too high: peaks of several processes need not have been at the same time.
        """
        return sum(self._peak_of(pid) for pid in self.pids())

    def prioritise(self) -> None:
        """Prefer their sessions over others', as `bench.load.prioritise` does for ours."""
        for pid in self.pids():
            with suppress(OSError):
                Path(f"/proc/{pid}/autogroup").write_text(_PRIORITY)

    def pids(self) -> list[int]:
        return [process.pid for process in self._living()]

    def _living(self) -> Iterator[psutil.Process]:
        for root in self._roots:
            with suppress(psutil.Error):
                process = psutil.Process(root)
                yield from (process, *process.children(recursive=True))

    def _peak_of(self, pid: int) -> int:
        with suppress(OSError):
            proportional = _fields(Path(f"/proc/{pid}/smaps_rollup"))
            resident = _fields(Path(f"/proc/{pid}/status"))
            shrunk = resident.get("VmHWM", 0) - resident.get("VmRSS", 0)
            return proportional.get("Pss", 0) + max(0, shrunk)
        return 0


def confine(cpus: Sequence[int]) -> None:
    """This process, and whatever it starts from now on, runs on these cores."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, set(cpus))


def _fields(path: Path) -> dict[str, int]:
    """Of lines as `Pss:   922 kB`, in bytes."""
    found: dict[str, int] = {}
    for line in path.read_text().splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if len(words) == 2 and words[1] == "kB":
            found[name] = int(words[0]) * _KIB
    return found
