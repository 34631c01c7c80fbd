"""Processor time and peak memory of a system's whole process trees, from /proc.

A page that several processes of a tree share counts once: memory of no file proportionally (PSS), and of a file
what that process holds of it that holds most, since another system may hold the same file. Never touches a process that
is not below the given roots.
"""

import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

_KIB = 1024
_RESET_PEAK = "5"  # NOTE: to clear_refs: the peak of resident memory starts anew
_PRIORITY = "-10"
_POLL_S = 0.001
_STUCK_S = 1.0
_MAPPING = re.compile(r"^(?=[0-9a-f]+-[0-9a-f]+ )", re.MULTILINE)
_SHARED_MEMORY = ("/dev/shm/", "/memfd:", "/SYSV", "/dev/zero")


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
        """Memory they hold now, and for each process what its resident memory has shrunk by since its peak.

        At most too high: peaks of several processes need not have been at the same time.
        """
        total = 0
        files: dict[str, int] = {}
        for pid in self.pids():
            with suppress(OSError):
                held = _file_bytes(Path(f"/proc/{pid}/smaps").read_text())
                total += self._own_peak_of(pid)
                files = {file: max(held.get(file, 0), files.get(file, 0)) for file in held | files}
        return total + sum(files.values())

    def stop(self) -> None:
        """SIGSTOP to all of them, until none runs: a signal takes effect when its process is next due.

        NOTE: a child that is stopped between vfork and exec keeps its parent from stopping, so all go on now and then.
        """
        go_on_s = time.monotonic() + _STUCK_S
        while running := [process for process in self._living() if _runs(process)]:
            for process in running:
                with suppress(psutil.Error):
                    process.suspend()
            time.sleep(_POLL_S)
            if time.monotonic() > go_on_s:
                self.go_on()
                time.sleep(_POLL_S)
                go_on_s = time.monotonic() + _STUCK_S

    def go_on(self) -> None:
        """SIGCONT to all of them."""
        for process in self._living():
            with suppress(psutil.Error):
                process.resume()

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

    def _own_peak_of(self, pid: int) -> int:
        """Without files. Raises OSError: it is gone."""
        proportional = _fields(Path(f"/proc/{pid}/smaps_rollup").read_text())
        resident = _fields(Path(f"/proc/{pid}/status").read_text())
        shrunk = resident.get("VmHWM", 0) - resident.get("VmRSS", 0)
        return proportional.get("Pss_Anon", 0) + proportional.get("Pss_Shmem", 0) + max(0, shrunk)


def _runs(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    return False


def confine(cpus: Sequence[int]) -> None:
    """This process, and whatever it starts from now on, runs on these cores."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, set(cpus))


def _file_bytes(smaps: str) -> dict[str, int]:
    """Resident bytes of each mapped file, by device and inode; a process's own copies of pages are not of the file.

    NOTE: shared memory is a file too, by a name of its own; no two systems share that.
    """
    found: dict[str, int] = {}
    for mapping in _MAPPING.split(smaps)[1:]:
        header, _, rest = mapping.partition("\n")
        _, _, _, device, inode, *name = header.split(maxsplit=5)
        if inode == "0" or "".join(name).startswith(_SHARED_MEMORY):
            continue
        fields = _fields(rest)
        file = f"{device} {inode}"
        found[file] = found.get(file, 0) + fields.get("Rss", 0) - fields.get("Anonymous", 0)
    return found


def _fields(text: str) -> dict[str, int]:
    """Of lines as `Pss:   922 kB`, in bytes."""
    found: dict[str, int] = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if len(words) == 2 and words[1] == "kB":
            found[name] = int(words[0]) * _KIB
    return found
