"""Results of one section, on disk from the moment they are known.

Invariant: the file is whole at any time. The parts of a section write one after the other, so none overwrites another.
"""

import json
import os
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.report import Row

MAX_ERROR_CHARACTERS = 4000


@dataclass(frozen=True, slots=True)
class Check:
    """One question of correctness. `detail`: by how much, or why it was not asked."""

    name: str
    case: str
    passed: bool
    detail: str = ""


class SectionResults:
    """Appends to `<folder>/<section>.json`; made where it does not exist."""

    def __init__(self, folder: Path, section: str, *, is_dry: bool) -> None:
        self._path = folder / f"{section}.json"
        self._found: dict[str, Any] = {"section": section, "dry": is_dry}
        if self._path.exists():
            self._found = json.loads(self._path.read_text())

    def describe(self, machine: Mapping[str, Any]) -> None:
        """Machine that this ran on."""
        self._found["machine"] = dict(machine)
        self._write()

    def row(self, row: Row) -> None:
        self._append("rows", asdict(row))
        share = "" if row.share is None else f" = {row.share:.0%} of the floor"
        print(f"{row.workload} · {row.system} · {row.metric}: {row.value:.5g} {row.unit}{share}", flush=True)

    def check(self, check: Check) -> None:
        self._append("checks", asdict(check))
        print(f"{'ok' if check.passed else 'WRONG'}: {check.name} · {check.case} · {check.detail}", flush=True)

    def note(self, text: str) -> None:
        self._append("notes", text)
        print(text, flush=True)

    def error(self, what: str, text: str) -> None:
        self._append("errors", {"what": what, "error": text[-MAX_ERROR_CHARACTERS:]})
        print(f"ERROR in {what}: {text[-MAX_ERROR_CHARACTERS:]}", flush=True)

    def took(self, part: str, seconds: float) -> None:
        self._append("took", {"part": part, "seconds": round(seconds, 1)})

    @contextmanager
    def guarded(self, what: str) -> Iterator[None]:
        """Errors inside are recorded as a result, and the run goes on."""
        started_s = time.perf_counter()
        try:
            yield
        except Exception:
            self.error(what, traceback.format_exc())
        finally:
            self.took(what, time.perf_counter() - started_s)

    def _append(self, kind: str, entry: object) -> None:
        self._found.setdefault(kind, []).append(entry)
        self._write()

    def _write(self) -> None:
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps(self._found, indent=1))
        os.replace(part, self._path)
