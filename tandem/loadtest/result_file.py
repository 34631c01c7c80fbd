"""Writes a load test's result as JSON. A path that cannot be written is reported before the test, not after it."""

import json
import sys
from pathlib import Path
from typing import Any

from tandem.core.errors import ConfigurationError


def check_writable(path: Path) -> None:
    """Creates the directory and checks that the file can be written; an existing file is not changed.

    Raises:
        ConfigurationError: it cannot.
    """
    existed = path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a"):
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        raise ConfigurationError(f"{path}: {error}; name a file that can be written") from error


def write_json(value: dict[str, Any], path: Path | None) -> None:
    """Writes the value to a file, or as one line to standard output."""
    if path is None:
        sys.stdout.write(json.dumps(value) + "\n")
        sys.stdout.flush()
        return
    try:
        path.write_text(_readable(value), encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"{path}: {error}; name a file that can be written") from error


def _readable(value: dict[str, Any]) -> str:
    """JSON with one line for each entry of longer lists, so that results can be compared by diff."""
    lines = [f"{json.dumps(name)}: {_entry(entry)}" for name, entry in value.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _entry(entry: Any) -> str:
    if isinstance(entry, list) and entry and isinstance(entry[0], dict):
        return "[\n " + ",\n ".join(map(json.dumps, entry)) + "\n]"
    if isinstance(entry, dict) and entry:
        return "{\n " + ",\n ".join(f"{json.dumps(key)}: {json.dumps(own)}" for key, own in entry.items()) + "\n}"
    return json.dumps(entry)
