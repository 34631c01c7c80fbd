"""A peer's server as a process group of its own: started, awaited, ended with everything that it started.

Leaving the context ends the whole group, also when its members ignore the request to, and also those that left it.
Never inherits settings of the client's environment that would change how a peer computes.
"""

import http.client
import os
import random
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from bench.race.system import NotHere
from tandem.process.ports import free_ports

ROOT = Path(__file__).parents[3]
HOST = "127.0.0.1"
_POLL_S = 0.1
_SHOWN_LINES = 6
_NOT_INHERITED = (
    "OMP_",
    "KMP_",
    "GOMP_",
    "MKL_",
    "ONEDNN_",
    "DNNL_",
    "VLLM_",
    "TANDEM_",
    "HF_",
    "PYTHON",
    "LD_PRELOAD",
)
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1"}
_PRIORITY = "-10"


@dataclass(frozen=True, slots=True)
class Program:
    """A server to run. `ready_url` answers 200 when it can serve; `grace_s`: how long it may take to end itself."""

    name: str
    command: Sequence[str]
    log: Path
    ready_url: str
    environment: Mapping[str, str] = field(default_factory=dict)
    ready_limit_s: float = 900.0
    grace_s: float = 20.0


@contextmanager
def running(*programs: Program) -> Iterator[tuple[int, ...]]:
    """Their process ids, which are their groups' too, once all are ready. They start at the same time.

    Raises:
        NotHere: one cannot be started, ended, or was not ready in its limit; the message has the end of its output.
    """
    with ExitStack() as stack:
        processes = [stack.enter_context(_group_of(program)) for program in programs]
        for program, process in zip(programs, processes, strict=True):
            _await_ready(program, process)
        yield tuple(process.pid for process in processes)


@contextmanager
def _group_of(program: Program) -> Iterator[subprocess.Popen[bytes]]:
    """It, started; its group is gone afterwards."""
    program.log.parent.mkdir(parents=True, exist_ok=True)
    with program.log.open("wb") as output:
        try:
            process = subprocess.Popen(
                program.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=surroundings(program.environment),
                start_new_session=True,
            )
        except OSError as error:
            raise NotHere(f"{program.name} cannot be started: {error}") from error
    try:
        _prioritise(process.pid)
        yield process
    finally:
        _end(process, program.grace_s)


def surroundings(more: Mapping[str, str]) -> dict[str, str]:
    """The environment of a peer's process: the client's, less what would change how the peer computes, and `more`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_NOT_INHERITED)}
    return {**kept, **_OFFLINE, **more}


def ports(count: int) -> list[int]:
    """Free ones of the loopback interface."""
    return free_ports(count, HOST, random.SystemRandom())


def cores() -> list[int]:
    """That the race is confined to, and so is everything that it starts."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def end_of(log: Path) -> str:
    """The last lines that say something."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return "\n".join(lines[-_SHOWN_LINES:]) or "(nothing)"


def _prioritise(pid: int) -> None:
    """As bench.load.prioritise, for the session of that process."""
    with suppress(OSError):
        Path(f"/proc/{pid}/autogroup").write_text(_PRIORITY)


def _await_ready(program: Program, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + program.ready_limit_s
    while not answers(program.ready_url):
        if process.poll() is not None:
            raise _not_ready(program, f"ended with status {process.returncode}")
        if time.monotonic() > deadline:
            raise _not_ready(program, f"was not ready after {program.ready_limit_s:g} s")
        time.sleep(_POLL_S)


def _not_ready(program: Program, what: str) -> NotHere:
    return NotHere(f"{program.name} {what}; its output ends: {end_of(program.log)}")


def answers(url: str) -> bool:
    """Whether it says 200."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (OSError, http.client.HTTPException):
        return False


def _end(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """NOTE: descendants are noted before the first signal: afterwards nothing leads to those outside the group."""
    members = _descendants(process.pid)
    _signal(process.pid, members, signal.SIGTERM)
    if left := _left_after(grace_s, process, members):
        _signal(process.pid, left, signal.SIGKILL)
        _left_after(grace_s, process, left)
    process.wait()


def _left_after(
    grace_s: float, process: subprocess.Popen[bytes], members: Sequence[psutil.Process]
) -> list[psutil.Process]:
    """Those of them and of the group that still run then; looked at again until none does."""
    deadline = time.monotonic() + grace_s
    while True:
        process.poll()
        left = [member for member in {*members, *_group(process.pid)} if _runs(member)]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(_POLL_S)


def _descendants(pid: int) -> list[psutil.Process]:
    """Those of the group, and its children in groups of their own."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _signal(group: int, members: Sequence[psutil.Process], number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, number)
    for member in members:
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getpgid(member.pid) != group:
                member.send_signal(number)


def _group(group: int) -> list[psutil.Process]:
    """Members of a process group."""
    found = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getpgid(process.pid) == group:
                found.append(process)
    return found


def _runs(process: psutil.Process) -> bool:
    """A zombie does not: it only waits for its parent to look."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
