"""Structured logs on the standard library: one line a record, each with its process and the request it is about.

Invariant: whatever a message or an extra field holds, a JSON record is one line of valid JSON, and a text record's
message cannot pretend to be another record. Code logs with `logging.getLogger(__name__)` and `extra={...}`.
"""

import contextlib
import json
import logging
import math
import os
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import TextIO

from tandem.core.errors import ConfigurationError

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")

request_id_var: ContextVar[str | None] = ContextVar("request_id", default=None)  # of this task; None = no request

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))} | {0x2028: "\\u2028", 0x2029: "\\u2029"}


@contextlib.contextmanager
def request_context(request_id: str) -> Iterator[None]:
    """Add the request id to the records logged inside the block, in this task and those it starts."""
    previous = request_id_var.get()
    request_id_var.set(request_id)
    try:
        yield
    finally:
        request_id_var.set(previous)  # NOTE: no token: an async generator may be closed in another context


def configure_logging(level: str, format: str, process: str, stream: TextIO | None = None) -> None:  # noqa: A002
    """Send every logger's records to `stream` (standard error), replacing what handled them before.

    Args:
        level: debug, info, warning or error.
        format: "text" for people, "json" for collectors.
        process: name of this process: gateway, router or a worker's id.

    Raises:
        ConfigurationError: naming the level or format that does not exist.
    """
    _require("log_level", level, LEVELS)
    _require("log_format", format, FORMATS)
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(process) if format == "json" else TextFormatter(process))
    root = logging.getLogger()
    for former in list(root.handlers):
        root.removeHandler(former)
    root.addHandler(handler)
    root.setLevel(level.upper())


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC), level, process, pid, logger, message, request_id, then the extras."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": _moment(record).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "process": self._process,
            "pid": os.getpid(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        request_id = _request_id(record)
        if request_id is not None:
            line["request_id"] = request_id
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        for name, value in _extras(record).items():
            line[f"{name}_" if name in line else name] = value
        return _one_line(line)


class TextFormatter(logging.Formatter):
    """`time level process logger: message [request] key=value`, and the traceback below."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        moment = _moment(record).astimezone().isoformat(sep=" ", timespec="milliseconds")[:23]
        parts = [f"{moment} {record.levelname:<7} {self._process}[{os.getpid()}] {record.name}: {record.getMessage()}"]
        request_id = _request_id(record)
        if request_id is not None:
            parts.append(f"[{request_id}]")
        parts += [f"{name}={value}" for name, value in _extras(record).items()]
        line = " ".join(parts).translate(_CONTROLS)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _require(name: str, value: str, accepted: tuple[str, ...]) -> None:
    if value not in accepted:
        raise ConfigurationError(f"{name}={value!r} does not exist; choose one of {', '.join(accepted)}")


def _moment(record: logging.LogRecord) -> datetime:
    return datetime.fromtimestamp(record.created, UTC)


def _request_id(record: logging.LogRecord) -> str | None:
    """The record's own request id, else that of its task."""
    request_id = getattr(record, "request_id", None)
    return request_id_var.get() if request_id is None else str(request_id)


def _extras(record: logging.LogRecord) -> dict[str, object]:
    return {name: value for name, value in vars(record).items() if name not in _STANDARD and name != "request_id"}


def _one_line(line: dict[str, object]) -> str:
    try:
        return json.dumps(line, allow_nan=False, default=str)
    except (TypeError, ValueError):  # a number JSON lacks, a key that is no text, or a circle
        return json.dumps({name: _plain(value) for name, value in line.items()}, allow_nan=False)


def _plain(value: object) -> object:
    is_plain = value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))
    return value if is_plain else str(value)
