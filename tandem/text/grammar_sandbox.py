"""Finds out whether a grammar can be compiled without taking this process with it, by compiling it in another.

Invariant: a grammar that hangs, crashes or fills the memory of its compiler is an answer here, never a fault of ours.
"""

import json
import os
import select
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from pathlib import Path

from tandem.core.errors import CapacityError

_TRIAL = Path(__file__).with_name("grammar_trial.py")
_TIMEOUT_S = 30.0  # the trial counts its own processor time; this is for a machine that gives it none


class GrammarSandbox:
    """One trial process, started when it is needed and replaced when a grammar ended it. Any thread may ask.

    `special_tokens`: those that a grammar may name, by id.
    """

    def __init__(self, special_tokens: Mapping[int, str]) -> None:
        self._special_tokens = json.dumps(special_tokens)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize[..., GrammarSandbox] | None = None

    def fault(self, grammar: str) -> str | None:
        """What is wrong with `grammar`; None = it compiles.

        Raises:
            CapacityError: this machine would not start a process, or gave it no time.
        """
        with self._lock:
            process = self._started()
            answer = _answer(process) if _tell(process, grammar) else None
            if answer is None:
                self._end()
                return "it takes too much time or memory to compile; make it smaller"
            found: str | None = json.loads(answer)
            return found

    def close(self) -> None:
        """End the process; a later question starts another."""
        with self._lock:
            self._end()

    def _started(self) -> subprocess.Popen[bytes]:
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
            _tell(self._process, self._special_tokens)
        return self._process

    def _end(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._process = self._finalizer = None


def _tell(process: subprocess.Popen[bytes], text: str) -> bool:
    """False: the process has ended."""
    assert process.stdin is not None
    data = text.encode()
    message = memoryview(len(data).to_bytes(4, "little") + data)
    try:
        while message:
            message = message[process.stdin.write(message) :]
    except BrokenPipeError:
        return False
    return True


def _answer(process: subprocess.Popen[bytes]) -> bytes | None:
    """The answer's line; None where the process ended instead, or has no time."""
    assert process.stdout is not None
    answer, deadline_s = b"", time.monotonic() + _TIMEOUT_S
    while not answer.endswith(b"\n"):
        left_s = deadline_s - time.monotonic()
        if left_s <= 0 or not select.select([process.stdout], [], [], left_s)[0]:
            return None
        chunk = os.read(process.stdout.fileno(), 1 << 16)
        if not chunk:
            return None
        answer += chunk
    return answer


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()
