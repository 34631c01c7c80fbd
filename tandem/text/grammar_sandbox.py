"""Checks that a grammar compiles by compiling it in a subprocess first, since a grammar may crash its compiler.

Invariant: a grammar that makes the compiler hang, crash or run out of memory is reported as invalid and never harms
this process.
"""

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tandem.core.errors import CapacityError
from tandem.text.grammar_trial import MAX_COMPILED_BYTES

_TRIAL = Path(__file__).with_name("grammar_trial.py")
# For one grammar; the subprocess limits its own processor time, so this is for a machine that gives it none.
_TIMEOUT_S = 30.0
_TOO_MUCH = "it takes too much time or memory to compile; make it smaller"
# NOTE: exit statuses for which the grammar is to blame: an error of Python's, no time, no memory, no stack.
_OWN_ENDS = {0, *(-number for number in (signal.SIGPROF, signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL))}


@dataclass(frozen=True, slots=True)
class Trial:
    """Result of compiling a grammar. `fault`: the error, as text; None = it compiles. `num_bytes`: memory that it takes
    then.
    """

    fault: str | None
    num_bytes: int = 0


class GrammarSandbox:
    """Runs the subprocess, which is started on demand and again after a grammar ended it. Any thread may call.

    Args:
        special_tokens: those that a grammar may name, by id.
    """

    def __init__(self, special_tokens: Mapping[int, str]) -> None:
        self._special_tokens = json.dumps(special_tokens)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize[..., GrammarSandbox] | None = None

    def trial(self, grammar: str) -> Trial:
        """Result of compiling `grammar`.

        Raises:
            CapacityError: this machine could not start the process, gave it no processor time, or killed it.
        """
        with self._lock:
            deadline_s = time.monotonic() + _TIMEOUT_S
            process = self._started(deadline_s)
            answer = _answer(process, deadline_s) if _tell(process, grammar, deadline_s) else None
            if answer is None:
                status = _status(process, deadline_s)
                self._end()
                if status in _OWN_ENDS:
                    return Trial(_TOO_MUCH)
                reason = f"gave no answer in {_TIMEOUT_S:g} s" if status is None else f"ended with status {status}"
                raise CapacityError(f"the process that tries a grammar {reason}; send the request again")
            fault, num_bytes = json.loads(answer)
            return Trial(_TOO_MUCH if fault is None and num_bytes > MAX_COMPILED_BYTES else fault, num_bytes)

    def close(self) -> None:
        """Ends the subprocess; a later call starts another."""
        with self._lock:
            self._end()

    def _started(self, deadline_s: float) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._end()
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", str(_TRIAL)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    bufsize=0,
                )
            except OSError as error:
                raise CapacityError(f"no process could be started to try a grammar in: {error}") from error
            self._finalizer = weakref.finalize(self, _kill, self._process)
            _tell(self._process, self._special_tokens, deadline_s)
        return self._process

    def _end(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._process = self._finalizer = None


def _tell(process: subprocess.Popen[bytes], text: str, deadline_s: float) -> bool:
    """Writes to the subprocess. False: it has ended or does not read."""
    assert process.stdin is not None
    data = text.encode()
    message = memoryview(len(data).to_bytes(4, "little") + data)
    try:
        while message:
            if not _awaited(process.stdin, select.POLLOUT, deadline_s):
                return False
            message = message[process.stdin.write(message[: select.PIPE_BUF]) :]  # NOTE: so much does not block
    except BrokenPipeError:
        return False
    return True


def _answer(process: subprocess.Popen[bytes], deadline_s: float) -> bytes | None:
    """The answer's line; None if the process ended instead, or the deadline passed."""
    assert process.stdout is not None
    answer = b""
    while not answer.endswith(b"\n"):
        if not _awaited(process.stdout, select.POLLIN, deadline_s):
            return None
        chunk = os.read(process.stdout.fileno(), 1 << 16)
        if not chunk:
            return None
        answer += chunk
    return answer


def _status(process: subprocess.Popen[bytes], deadline_s: float) -> int | None:
    """The exit status; None if it has not ended."""
    try:
        return process.wait(deadline_s - time.monotonic())
    except subprocess.TimeoutExpired:
        return None


def _awaited(pipe: IO[bytes], event: int, deadline_s: float) -> bool:
    """Whether the pipe was ready, or closed by the other side, before the deadline."""
    ready = select.poll()
    ready.register(pipe, event)
    left_s = deadline_s - time.monotonic()
    return left_s > 0 and bool(ready.poll(left_s * 1000))


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()
