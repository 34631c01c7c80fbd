"""Output of supervised processes: one stream with the process's name before each line, or one file for each process.

Invariant: writing never raises, since a process whose output is not read would block.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TextIO

from tandem.cli.line_sink import ClosedSinkError, LineSink
from tandem.core.errors import ConfigurationError

_NAME_WIDTH = 9
_UP = "tandem"


class ProcessOutput:
    """Writes lines until its context is left. Lines that a full disk cannot store are dropped, counted and reported.

    Args:
        directory: of one file a process, appended to; None = everything goes to `stream`.
        stream: also takes what the supervisor reports.

    Raises:
        ConfigurationError: the directory cannot be made.
    """

    def __init__(self, directory: Path | None, stream: TextIO) -> None:
        self._directory = directory
        self._stream = LineSink.to_stream(stream)
        self._files: dict[str, LineSink] = {}
        self._on_closed: Callable[[], None] = lambda: None
        if directory is not None:
            try:
                directory.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigurationError(
                    f"log_dir={directory}: {error}; name a directory that can be written"
                ) from error

    def on_closed(self, act: Callable[[], None]) -> None:
        """Set the function called when lines can no longer be written, for example because the terminal was closed."""
        self._on_closed = act

    def line(self, name: str, text: str) -> None:
        """Writes a line that process `name` has written."""
        if self._directory is None:
            self._write(self._stream, f"{name:<{_NAME_WIDTH}} | {text}")
        else:
            self._write(self._file(self._directory, name), text)

    def report(self, text: str) -> None:
        """Writes a line of the supervisor itself."""
        self._write(self._stream, f"{_UP:<{_NAME_WIDTH}} | {text}")

    def log_handler(self) -> logging.Handler:
        """Handler that writes this process's own log records like `report`."""
        return _ReportHandler(self.report)

    def __enter__(self) -> "ProcessOutput":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files.values():
            file.finish()
        self._stream.finish()

    def _file(self, directory: Path, name: str) -> LineSink:
        if name not in self._files:
            self._files[name] = LineSink.to_file(directory / f"{name}.log", self.report)
        return self._files[name]

    def _write(self, sink: LineSink, line: str) -> None:
        try:
            sink.write(line)
        except ClosedSinkError:
            self._on_closed()


class _ReportHandler(logging.Handler):
    """Leaves out records about a checkpoint's unknown settings. NOTE: every worker logs these too."""

    def __init__(self, report: Callable[[str], None]) -> None:
        super().__init__(logging.INFO)
        self._report = report

    def emit(self, record: logging.LogRecord) -> None:
        if not record.name.startswith("tandem.architecture"):
            self._report(record.getMessage())
