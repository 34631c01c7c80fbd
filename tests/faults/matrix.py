"""Results of each fault, as a table at the end of the report.

`TANDEM_FAULT_MATRIX` names a file that it is written to as well: JSON, or Markdown where it ends in .md.
"""

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import pytest


@dataclass(frozen=True, slots=True)
class Row:
    """One fault and what became of it.

    silence_s: longest wait for a token that a client saw; fresh_s: a new request, from being sent to its end; free_s:
    until no survivor held a block; leaked: blocks and leases held after that.
    """

    process: str
    state: str
    signal: str
    outcome: str
    silence_s: float | None = None
    fresh_s: float | None = None
    free_s: float | None = None
    leaked: int = 0

    def cells(self) -> list[str]:
        return [_shown(getattr(self, each.name)) for each in fields(self)]


Matrix = list[Row]
PROPERTY = "fault"
"""Of a test's report, which goes from the process that ran it to the one that tells: a row as JSON."""
HEADINGS = ["process", "state", "signal", "outcome", "silence, s", "new request, s", "blocks free after, s", "leaked"]


def table_of(rows: Matrix) -> list[str]:
    """The matrix in Markdown."""
    cells = [HEADINGS, *(row.cells() for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(HEADINGS))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in cells
    ]
    return [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]


def property_of(row: Row) -> tuple[str, str]:
    return PROPERTY, json.dumps(asdict(row))


def rows_of(reports: Iterable[pytest.TestReport]) -> Matrix:
    """All that tests have noted."""
    ends = (report.user_properties for report in reports if report.when == "teardown")
    return [Row(**json.loads(str(value))) for end in ends for name, value in end if name == PROPERTY]


def tell(rows: Matrix, terminal: pytest.TerminalReporter) -> None:
    """Show the table, and write it where it is asked for."""
    lines = table_of(rows)
    terminal.section("faults")
    terminal.write("\n".join(lines) + "\n")
    if path := os.environ.get("TANDEM_FAULT_MATRIX"):
        text = "\n".join(lines) if path.endswith(".md") else json.dumps([asdict(row) for row in rows], indent=1)
        Path(path).write_text(text + "\n")


def _shown(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)
