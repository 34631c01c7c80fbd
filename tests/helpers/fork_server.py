"""Starts services as forks of a process that has imported them: importing PyTorch is most of what a start costs.

The started processes are as real as others: own pid, own process group, own memory. `ForkServer` is the client's side;
the module itself, run as a program, is the server. It ends when its client does, and the kernel ends its children then.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem.process.child import pin_to, tie_to

ROOT = Path(__file__).parents[2]
AT_IMPORT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "GRPC_VERBOSITY": "NONE"}
"""Variables that libraries read when they are imported: those of a worker with a share of one core."""
_SERVICES = ("tandem.worker.process", "tandem.gateway.server", "tandem.router.process")
_COMMANDS = tuple(f"tandem.cli.{verb}" for verb in ("up", "generate", "chat", "load", "quantize"))
IMPORTED = (*_SERVICES, *_COMMANDS, "tandem.engine.ranks")
_MAX_BYTES = 1 << 18
_MAX_DESCRIPTORS = 8
_STREAMS = (1, 2, 0)
_POLL_S = 0.005
_exit_codes: dict[int, int] = {}  # at the server, of children that have ended, by pid


class ForkedProcess:
    """A started process: the part of `subprocess.Popen` that tests use."""

    def __init__(self, server: "ForkServer", pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._server = server

    def poll(self) -> int | None:
        """Exit code, negative for a signal; None while it lives."""
        if self.returncode is None:
            self.returncode = self._server.ask({"poll": self.pid})
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Nothing where it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def wait_stopped(self) -> None:
        """Wait until every thread has stopped, after SIGSTOP."""
        self._server.ask({"stopped": self.pid})

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; returns the exit code. Raises `subprocess.TimeoutExpired`."""
        deadline_s = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline_s is not None and time.monotonic() > deadline_s:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            time.sleep(_POLL_S)
        return code


class ForkServer:
    """Client of a server process of its own, which is started by the first use. Safe to use by several threads."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def start(
        self,
        module: str,
        arguments: Sequence[str],
        env: Mapping[str, str],
        cpus: Sequence[int],
        output: int,
        *,
        errors: int | None = None,
        given: int | None = None,
        passed: Sequence[int] = (),
        directory: Path = ROOT,
    ) -> ForkedProcess:
        """Run `module` as `python -m` does, in a process group of its own.

        Args:
            env: all its variables.
            cpus: cores it is confined to; empty = any.
            output: file descriptor for what it writes.
            errors: another one for what it writes to standard error.
            given: file descriptor that it reads; None: an empty one.
            passed: further file descriptors for it; their numbers there are its last arguments.
            directory: its working directory.
        """
        request = {"module": module, "arguments": list(arguments), "env": dict(env), "cpus": list(cpus)}
        streams = [output, output if errors is None else errors, *([] if given is None else [given])]
        place = {"directory": str(directory), "num_passed": len(passed)}
        return ForkedProcess(self, self.ask({**request, **place}, [*streams, *passed]))

    @property
    def pid(self) -> int | None:
        """None before its first use."""
        return None if self._process is None else self._process.pid

    def ask(self, request: Mapping[str, Any], descriptors: Sequence[int] = ()) -> Any:
        """The server's answer."""
        with self._lock:
            if self._socket is None:
                self._socket, self._process = _started()
            socket.send_fds(self._socket, [json.dumps(request).encode()], descriptors)
            return json.loads(self._socket.recv(_MAX_BYTES))


SERVER = ForkServer()


def is_forkable(argv: Sequence[str], env: Mapping[str, str]) -> bool:
    """Whether `SERVER` can start a program: a module, with the variables at import that the server has."""
    others = {name: value for name, value in env.items() if not name.startswith("TANDEM_")}
    return sys.platform.startswith("linux") and tuple(argv[:2]) == (sys.executable, "-m") and others == AT_IMPORT


def _started() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MAX_BYTES)
    env = {**os.environ, **AT_IMPORT, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "tests.helpers.fork_server", str(theirs.fileno())]
    with theirs:
        server = subprocess.Popen(command, cwd=ROOT, env=env, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    return ours, server


def _serve(connection: socket.socket) -> None:
    """Answer until the client closes."""
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # NOTE: so that no collection of a child copies what all share
    while True:
        data, descriptors, _, _ = socket.recv_fds(connection, _MAX_BYTES, _MAX_DESCRIPTORS)
        if not data:
            return
        request = json.loads(data)
        if "poll" in request:
            answer = _polled(request["poll"])
        elif "stopped" in request:
            with contextlib.suppress(ChildProcessError):  # it has ended
                os.waitid(os.P_PID, request["stopped"], os.WSTOPPED)
            answer = None
        else:
            answer = _forked(request, descriptors, connection)
            for descriptor in descriptors:
                os.close(descriptor)
        connection.send(json.dumps(answer).encode())


def _polled(pid: int) -> int | None:
    """Exit code of a child, however often and by however many threads it is asked for; None while it lives."""
    if pid not in _exit_codes:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if not ended:
            return None
        _exit_codes[pid] = os.waitstatus_to_exitcode(status)
    return _exit_codes[pid]


def _forked(request: Mapping[str, Any], descriptors: Sequence[int], connection: socket.socket) -> int:
    """Returns the child's pid; does not return in the child."""
    server = os.getpid()
    pid = os.fork()
    if pid:
        _exit_codes.pop(pid, None)
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)  # NOTE: both sides do it, so that it is done when either goes on
        return pid
    os.setpgid(0, 0)
    tie_to(server)
    connection.close()
    num_streams = len(descriptors) - request["num_passed"]
    for stream, descriptor in zip(_STREAMS, descriptors[:num_streams], strict=False):
        os.dup2(descriptor, stream)
        os.close(descriptor)
    # NOTE: new objects, since those that the server had know what kind of files its own streams were
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["env"])
    if request["cpus"]:
        pin_to(",".join(map(str, request["cpus"])))
    sys.argv = [request["module"], *request["arguments"], *map(str, descriptors[num_streams:])]
    runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
    sys.exit(0)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with socket.socket(fileno=int(sys.argv[1])) as client:
        _serve(client)
