"""The race itself: round after round the systems of a heat stand side by side, and each workload is asked of one after
the other; systems that have no turn are stopped.

Invariant: one system runs at a time, and what was measured is kept at once. A system that fails costs only its own
rows: after a failure it is started anew for what is left.
"""

import datetime
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from bench.race.measure import Gauge, Measured
from bench.race.runs import Run, Runs, Slot
from bench.race.stand import Stand
from bench.race.system import NotHere, System
from bench.race.workloads import Workload

_SHOWN_CHARACTERS = 600
_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class Track:
    """Track of one shape: its checkpoint and the measuring client."""

    shape: str
    checkpoint: Path
    gauge: Gauge


class Race:
    """Runs `systems` over `workloads`, `rounds` times each.

    `tell` gets a line about each thing that happens. `at_once`: so many systems stand side by side, in their order.
    """

    def __init__(
        self,
        systems: Sequence[System],
        workloads: Sequence[Workload],
        rounds: int,
        runs: Runs,
        tell: Callable[[str], None],
        git_sha: str = "",
        at_once: int = 1,
    ) -> None:
        self._systems = list(systems)
        self._workloads = workloads
        self._rounds = rounds
        self._runs = runs
        self._tell = tell
        self._git_sha = git_sha
        self._at_once = at_once
        self.absent: dict[str, str] = {}

    def prepare(self) -> None:
        """Make every environment; systems that cannot be had are left out, and `absent` says why."""
        for system in list(self._systems):
            self._tell(f"preparing {system.name}")
            try:
                system.prepare()
            except Exception as error:  # whatever another project's installation may do
                self._leave_out(system, error)

    def run(self, track: Track) -> None:
        """All rounds of one shape. Each round begins with another heat, and each workload with another system."""
        heats = [self._systems[first : first + self._at_once] for first in range(0, len(self._systems), self._at_once)]
        for turn in range(self._rounds):
            for heat in _from(heats, turn):
                self._run_heat(track, heat, turn)

    def slots(self, shape: str) -> Iterator[Slot]:
        """The place of every run, in the table's order."""
        for workload in self._workloads:
            for system in self._systems:
                for turn in range(self._rounds):
                    yield Slot(shape, workload.key, system.name, turn)

    def _run_heat(self, track: Track, heat: Sequence[System], turn: int) -> None:
        """One round of those who stand side by side."""
        missing = {
            system.name: [one for one in self._workloads if not self._runs.has(_slot(track, one, system, turn), one)]
            for system in heat
        }
        with Stand(track.checkpoint) as stand:
            for system in _from(heat, turn):
                self._start(track, stand, system, turn, missing[system.name])
            for number, workload in enumerate(self._workloads):
                for system in _from(heat, turn + number):
                    left = missing[system.name]
                    if workload not in left:
                        continue
                    left.remove(workload)
                    if not self._attempt(track, stand, system, turn, workload):
                        stand.end(system.name)
                        self._start(track, stand, system, turn, left)

    def _start(self, track: Track, stand: Stand, system: System, turn: int, missing: list[Workload]) -> None:
        """Unless nothing is missing; where it does not start, nothing is from now on."""
        if system.name in self.absent:
            missing.clear()
        if not missing:
            return
        self._tell(f"round {turn + 1} · {track.shape} · {system.name}: starting")
        try:
            stand.start(system)
        except NotHere as error:
            self._leave_out(system, error)
            missing.clear()
        except Exception as error:  # whatever another project's server may do
            self._tell(f"  {system.name}: {_described(error)}")
            for workload in missing:
                self._keep(track, system, turn, workload, failure=_described(error))
            missing.clear()

    def _attempt(self, track: Track, stand: Stand, system: System, turn: int, workload: Workload) -> bool:
        """Measure one workload and keep what came of it; returns whether it went well."""
        seed = f"{track.shape}/{workload.key}/{turn}"
        try:
            with stand.running(system) as served:
                measured = track.gauge.measure(system, served, workload, seed)
        except Exception as error:  # NOTE: one row is lost, loudly; the race goes on
            self._tell(f"  {system.name} · {workload.key}: FAILED, {_described(error)}")
            self._keep(track, system, turn, workload, failure=_described(error))
            return False
        self._tell(f"  {system.name} · {workload.key}: {_line(measured)}")
        self._keep(track, system, turn, workload, measured)
        return True

    def _keep(
        self,
        track: Track,
        system: System,
        turn: int,
        workload: Workload,
        measured: Measured | None = None,
        failure: str = "",
    ) -> None:
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        slot = _slot(track, workload, system, turn)
        definition = self._runs.definition(slot, workload)
        self._runs.keep(Run(slot, definition, measured, failure, self._git_sha, date))

    def _leave_out(self, system: System, error: Exception) -> None:
        self.absent[system.name] = _described(error)
        self._tell(f"{system.name} is left out: {_described(error)}")


def _from(items: Sequence[_Item], first: int) -> list[_Item]:
    """All of them, in turn, from that one on."""
    first %= max(1, len(items))
    return [*items[first:], *items[:first]]


def _slot(track: Track, workload: Workload, system: System, turn: int) -> Slot:
    return Slot(track.shape, workload.key, system.name, turn)


def _described(error: Exception) -> str:
    """Its end: logs say last what went wrong."""
    text = str(error) or type(error).__name__
    return text if len(text) <= _SHOWN_CHARACTERS else f"…{text[-_SHOWN_CHARACTERS:]}"


def _line(measured: Measured) -> str:
    figures = ", ".join(f"{name} {value:.4g}" for name, value in measured.figures.items())
    return f"{measured.wall_s:.1f} s; {figures}; foreign cores {measured.foreign_cores:.1f}"
