"""Runs as a race would have left them, from a few figures."""

from collections.abc import Mapping

from bench.race.measure import Measured
from bench.race.runs import Run, Slot


def measured(
    figures: Mapping[str, float], floors: Mapping[str, float] | None = None, foreign_cores: float = 0.0
) -> Measured:
    return Measured(dict(figures), dict(floors or {}), 1.0, foreign_cores, 0.1, 0.0, 1e9, 1e9)


def run(
    system: str,
    workload: str,
    turn: int = 0,
    *,
    shape: str = "small",
    floors: Mapping[str, float] | None = None,
    foreign_cores: float = 0.0,
    failure: str = "",
    **figures: float,
) -> Run:
    """`figures`: by name, with _ for the space: `output_rate=3.0`."""
    named = {name.replace("_", " "): value for name, value in figures.items()}
    found = None if failure else measured(named, floors, foreign_cores)
    return Run(Slot(shape, workload, system, turn), {}, found, failure, date=f"2026-01-{turn + 1:02}")
