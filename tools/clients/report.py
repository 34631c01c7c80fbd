"""Report on the clients: a table to read and JSON to keep."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientReport:
    """One client.

    Args:
        versions: of its packages, as installed.
        checks: name and failure (None: it held) of each.
        problem: why it could not be run at all.
        notes: figures that its script kept.
    """

    client: str
    shows: str
    versions: dict[str, str] = field(default_factory=dict)
    checks: Sequence[dict[str, str | None]] = ()
    problem: str | None = None
    notes: dict[str, Any] = field(default_factory=dict)
    duration_s: float = 0.0

    @property
    def failed(self) -> list[dict[str, str | None]]:
        return [check for check in self.checks if check["failure"]]

    @property
    def is_well(self) -> bool:
        """It ran, and everything it checked held."""
        return self.problem is None and bool(self.checks) and not self.failed

    @property
    def result(self) -> str:
        if self.problem is not None:
            return "not run"
        return f"{len(self.checks) - len(self.failed)} of {len(self.checks)} checks"


def show(reports: Sequence[ClientReport], console: Console) -> None:
    """The table, then every failure in its client's words."""
    table = Table("client", "version", "exercised", "result", "s")
    for report in reports:
        versions = "\n".join(f"{name} {version}" for name, version in report.versions.items())
        colour = "green" if report.is_well else "red"
        table.add_row(
            report.client, versions, report.shows, f"[{colour}]{report.result}[/]", f"{report.duration_s:.0f}"
        )
    console.print(table)
    for report in reports:
        if report.problem is not None:
            console.print(f"{report.client}: {report.problem}", markup=False)
        for check in report.failed:
            console.print(f"{report.client}: {check['check']}: {check['failure']}", markup=False)


def save(reports: Sequence[ClientReport], path: Path) -> None:
    path.write_text(json.dumps([asdict(report) | {"is_well": report.is_well} for report in reports], indent=1))
