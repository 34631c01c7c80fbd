"""Report of a benchmark run: rows, and the circumstances without which a number means nothing."""

import datetime
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from tandem.loadtest.environment import cpu_model

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class Row:
    """One measured figure: the median of `samples`.

    `value` and `floor` share `unit`; `share` is how much of the floor's speed was reached. `foreign_cores`: how many
    cores other processes kept busy meanwhile; above 0.3 the row is weak.
    """

    workload: str
    system: str
    metric: str
    value: float
    unit: str
    floor: float | None = None
    share: float | None = None
    samples: tuple[float, ...] = ()
    foreign_cores: float | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """A whole run."""

    name: str
    config: Mapping[str, Any]
    rows: Sequence[Row]
    notes: Sequence[str] = ()
    circumstances: Mapping[str, Any] = field(default_factory=lambda: circumstances())

    def print(self) -> None:
        """The table, then the JSON line."""
        table = Table(
            "workload", "system", "metric", "value", "unit", "floor", "share of floor", "foreign cores", title=self.name
        )
        for row in self.rows:
            share = "" if row.share is None else f"{row.share:.0%}"
            floor = "" if row.floor is None else f"{row.floor:.4g}"
            foreign = "" if row.foreign_cores is None else f"{row.foreign_cores:.1f}"
            table.add_row(row.workload, row.system, row.metric, f"{row.value:.4g}", row.unit, floor, share, foreign)
        Console(width=140).print(table)
        for note in self.notes:
            print(note)
        print(json.dumps(asdict(self)))

    def save(self) -> Path:
        """Write it under bench/results, named by date and commit."""
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"{self.name}-{self.circumstances['date'][:10]}-{self.circumstances['git_sha'][:8]}.json"
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")
        return path


def circumstances() -> dict[str, Any]:
    """Date, commit, hardware and versions of this run."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "git_sha": _git("rev-parse", "HEAD") or "unknown",
        "git_dirty": _git("status", "--porcelain", "--untracked-files=no") != "",
        "cpu": cpu_model(),
        "num_cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _git(*arguments: str) -> str:
    found = subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=Path(__file__).parent, check=False)
    return found.stdout.strip() if found.returncode == 0 else "unknown"
