"""Launcher between a supervisor and its child: ties the child's life to the supervisor's, pins it, then becomes it.

Run by path, on the standard library alone, so that it costs milliseconds. On Linux the kernel kills the child when the
thread that started it ends, however that ends. The supervisor stops its child by SIGTERM. The child ignores SIGINT
until it installs a handler, so that Ctrl-C, which reaches all processes, ends none while it still imports.
"""

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1
_CANNOT_RUN = 2


def launch_command(command: Sequence[str], cpus: Sequence[int] = (), tied: bool = True) -> list[str]:
    """Command line that runs `command` on `cpus` (none: anywhere) and, if `tied`, ends it with this process."""
    parent = str(os.getpid()) if tied else "0"
    return [sys.executable, "-I", "-S", __file__, parent, ",".join(map(str, cpus)), *command]


def tie_to(parent: int) -> None:
    """Makes the kernel kill this process when the thread of `parent` that started it ends (Linux)."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != parent:  # it died before we asked to be told
            os.kill(os.getpid(), signal.SIGKILL)


def pin_to(cpus: str) -> None:
    """Confines this process to cores, given as `0,2`."""
    if hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(OSError):  # NOTE: a core that went away costs speed, not service
            os.sched_setaffinity(0, {int(cpu) for cpu in cpus.split(",")})


def _become(parent: int, cpus: str, command: list[str]) -> None:
    if parent:
        tie_to(parent)
    if cpus:
        pin_to(cpus)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"error: {command[0]} cannot be run: {error}\n")
        sys.exit(_CANNOT_RUN)


if __name__ == "__main__":
    _become(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
