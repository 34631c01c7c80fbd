"""Runs of the race so far, one file each, so that an interrupted race goes on at the same place.

A run counts only for the workload as it is defined now, and for the settings that its system has now; one whose
settings that were not written down does not count. A failure is kept for the report, and tried again next time.
"""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.race.measure import Measured
from bench.race.workloads import Workload


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one run: who, what, which time."""

    shape: str
    workload: str
    system: str
    turn: int


@dataclass(frozen=True, slots=True)
class Run:
    """Result of it: `measured`, or why not. `definition`: the workload's own numbers, and the system's settings."""

    slot: Slot
    definition: Mapping[str, Any]
    measured: Measured | None = None
    failure: str = ""
    git_sha: str = ""
    date: str = ""


@dataclass(frozen=True, slots=True)
class Runs:
    """Those below `directory`. `settings`: what each system is run with now, as JSON keeps it."""

    directory: Path
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def keep(self, run: Run) -> None:
        """Write it, whole or not at all."""
        path = self._path(run.slot)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(run), indent=1))
        partial.replace(path)

    def find(self, slot: Slot, workload: Workload) -> Run | None:
        """The run of that slot, unless the workload or the system's settings have changed since."""
        path = self._path(slot)
        if not path.exists():
            return None
        run = _read(path)
        return run if run.definition == self.definition(slot, workload) else None

    def definition(self, slot: Slot, workload: Workload) -> Mapping[str, Any]:
        """Definition of a run in that slot."""
        return {**definition_of(workload), **self.settings.get(slot.system, {})}

    def has(self, slot: Slot, workload: Workload) -> bool:
        """Whether it was measured."""
        run = self.find(slot, workload)
        return run is not None and run.measured is not None

    def of(self, slots: Sequence[Slot], workloads: Mapping[str, Workload]) -> Iterator[Run]:
        """Those that there are, failed ones too."""
        for slot in slots:
            run = self.find(slot, workloads[slot.workload])
            if run is not None:
                yield run

    def forget(self) -> None:
        """Delete them all."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def _path(self, slot: Slot) -> Path:
        return self.directory / slot.shape / slot.system / f"{slot.workload}-{slot.turn}.json"


def definition_of(workload: Workload) -> Mapping[str, Any]:
    """Its numbers, as JSON keeps them; what it is called does not count."""
    found: dict[str, Any] = asdict(workload)  # type: ignore[call-overload]
    return {name: value for name, value in found.items() if name not in ("key", "title")}


def _read(path: Path) -> Run:
    told = json.loads(path.read_text())
    measured = told["measured"]
    return Run(
        Slot(**told["slot"]),
        told["definition"],
        None if measured is None else Measured(**measured),
        told["failure"],
        told["git_sha"],
        told["date"],
    )
