"""Results of each fault, as a table."""

from dataclasses import dataclass, fields


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
HEADINGS = ["process", "state", "signal", "outcome", "silence, s", "new request, s", "blocks free after, s", "leaked"]


def table_of(rows: Matrix) -> list[str]:
    """The matrix in Markdown."""
    cells = [HEADINGS, *(row.cells() for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(HEADINGS))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in cells
    ]
    return [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]


def _shown(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)
