"""Appends lines to a file, pipe or terminal, and survives a full disk: lines that cannot be written are dropped.

Dropped lines are counted and reported. Invariant: there is no buffer, so nothing of a failed line is left to fail again
later, and closing never raises.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

_GONE = {errno.EPIPE, errno.EBADF, errno.ECONNRESET}


class ClosedSinkError(Exception):
    """The destination accepts no more lines, for example because the terminal was closed."""


class LineSink:
    """Writes lines until it is closed.

    Args:
        open_descriptor: opens a descriptor that this sink owns; called for the first line, and again after a failure.
        encode: returns the bytes of a line.
        tell: receives a message when lines begin to be dropped, and when they are written again.
    """

    def __init__(
        self, open_descriptor: Callable[[], int], encode: Callable[[str], bytes], tell: Callable[[str], None]
    ) -> None:
        self._open_descriptor, self._encode, self._tell = open_descriptor, encode, tell
        self._descriptor: int | None = None
        self._is_torn = False
        self._num_dropped = 0

    @staticmethod
    def to_file(path: Path, tell: Callable[[str], None]) -> "LineSink":
        """Sink that appends to a file, which is created with the first line."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        return LineSink(
            lambda: os.open(path, flags, 0o666),
            lambda line: line.encode(errors="replace"),
            lambda what: tell(f"{path} {what}"),
        )

    @staticmethod
    def to_stream(stream: TextIO) -> "LineSink":
        """Sink that writes past the buffer of `stream`, which should be empty. Dropped lines are reported in it."""
        return LineSink(
            lambda: os.dup(stream.fileno()),
            lambda line: line.encode(stream.encoding, "backslashreplace"),
            lambda what: None,
        )

    def write(self, line: str) -> None:
        """Writes `line` and an end of line, or drops it.

        Raises:
            ClosedSinkError: nobody will take this line or a later one.
        """
        try:
            self._append(self._encode(f"{self._gap()}{line}\n"))
        except ValueError as error:  # NOTE: a stream of Python's that was closed
            raise ClosedSinkError from error
        except OSError as error:
            is_gone = self._is_gone(error)
            self.close()
            if is_gone:
                raise ClosedSinkError from error
            self._drop(error)
        else:
            self._end_outage("is written again")

    def close(self) -> None:
        """Closes the descriptor; a later line opens it again."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None

    def finish(self) -> None:
        """Closes the sink, and reports an outage that has not ended."""
        self.close()
        self._end_outage("is closed")

    def _gap(self) -> str:
        """Text that tells a reader of missing lines, before the next line."""
        end_of_torn_line = "\n" if self._is_torn else ""
        return end_of_torn_line + (f"({_dropped(self._num_dropped)})\n" if self._num_dropped else "")

    def _append(self, data: bytes) -> None:
        if self._descriptor is None:
            self._descriptor = self._open_descriptor()
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]
            self._is_torn = bool(rest)

    def _is_gone(self, error: OSError) -> bool:
        """Whether no later line can be written either. NOTE: EIO means a closed terminal, or a file's damaged disk."""
        if error.errno != errno.EIO or self._descriptor is None:
            return error.errno in _GONE
        return not stat.S_ISREG(os.fstat(self._descriptor).st_mode)

    def _drop(self, error: OSError) -> None:
        self._num_dropped += 1
        if self._num_dropped == 1:
            self._tell(f"cannot be written ({error.strerror}): lines are dropped until it can")

    def _end_outage(self, what: str) -> None:
        if self._num_dropped:
            num_dropped, self._num_dropped = self._num_dropped, 0
            self._tell(f"{what}; {_dropped(num_dropped)}")


def _dropped(num_lines: int) -> str:
    return "1 line was dropped" if num_lines == 1 else f"{num_lines} lines were dropped"
