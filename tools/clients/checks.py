"""Reports of a client's script: one line a check, written as JSON even when checks fail.

Runs in any client's environment: imports the standard library only.
"""

import argparse
import contextlib
import importlib.metadata
import json
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_MAX_REASON_CHARACTERS = 2000


class Checks:
    """One client's checks. `url`: of the gateway; `model`: its name; `checkpoint`: its directory; `work`: for files."""

    def __init__(self, url: str, model: str, checkpoint: Path, work: Path, engine_python: str) -> None:
        self.url = url
        self.model = model
        self.checkpoint = checkpoint
        self.work = work
        self.engine_python = engine_python
        self.notes: dict[str, Any] = {}
        self._done: list[dict[str, str | None]] = []

    @classmethod
    def from_arguments(cls) -> "Checks":
        parser = argparse.ArgumentParser()
        for name in ("url", "model", "engine-python"):
            parser.add_argument(f"--{name}", required=True)
        for name in ("checkpoint", "work"):
            parser.add_argument(f"--{name}", type=Path, required=True)
        given = parser.parse_args()
        given.work.mkdir(parents=True, exist_ok=True)
        return cls(given.url, given.model, given.checkpoint, given.work, given.engine_python)

    @contextlib.contextmanager
    def that(self, name: str) -> Iterator[None]:
        """A check that fails when the block raises; the next ones go on."""
        reason = None
        try:
            yield
        except Exception as error:  # whatever a client raises, the report says it
            reason = f"{type(error).__name__}: {error}"[:_MAX_REASON_CHARACTERS]
            traceback.print_exc()
        self._done.append({"check": name, "failure": reason})
        sys.stdout.write(f"{'ok    ' if reason is None else 'FAILED'} {name}\n")
        sys.stdout.flush()

    def finish(self, packages: Sequence[str]) -> None:
        """Write the report and end the script: 0 when every check held."""
        versions = {name: importlib.metadata.version(name) for name in packages}
        report = {"versions": versions, "checks": self._done, "notes": self.notes}
        (self.work / "report.json").write_text(json.dumps(report, indent=1))
        sys.exit(any(check["failure"] for check in self._done))


def equal(found: object, wanted: object) -> None:
    """Raises AssertionError showing both."""
    if found != wanted:
        raise AssertionError(f"{found!r} is not {wanted!r}")


def holds(value: object, what: str) -> None:
    """Raises AssertionError saying what does not hold."""
    if not value:
        raise AssertionError(f"{what}: {value!r}")
