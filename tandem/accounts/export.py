"""Makes rows of ledger entries or totals, and CSV or JSON text of rows, for `rows.usage_text`.

Costs are exact decimals, as text. In CSV, text that a spreadsheet would run as a formula gets an apostrophe before it.
"""

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from tandem.accounts.charge import LedgerEntry, Total
from tandem.accounts.money import format_nanos
from tandem.accounts.usage import Usage

GROUPS = ("day", "key_id", "tenant", "model")
_FORMULAS = ("=", "+", "-", "@", "\t", "\r")


class Format(StrEnum):
    """Format of an export."""

    CSV = "csv"
    JSON = "json"


def entry_rows(entries: Iterable[LedgerEntry]) -> list[dict[str, Any]]:
    """One row for each entry: time in UTC with milliseconds, usage in tokens, cost as a decimal."""
    return [
        {
            "time": datetime.fromtimestamp(entry.at_ms / 1000, UTC).isoformat(timespec="milliseconds"),
            "request_id": entry.request_id,
            "key_id": entry.key_id,
            "tenant": entry.tenant,
            "model": entry.model,
            "outcome": entry.outcome,
            **asdict(entry.usage),
            "cost": format_nanos(entry.cost_nanos),
        }
        for entry in entries
    ]


def total_rows(totals: Iterable[Total], by: Sequence[str] = GROUPS) -> list[dict[str, Any]]:
    """One row of sums for each combination of values of the columns `by` (some of `GROUPS`) that occurs."""
    sums: dict[tuple[str, ...], tuple[int, Usage, int]] = {}
    for total in totals:
        who = tuple(getattr(total, name) for name in by)
        num_requests, usage, cost_nanos = sums.get(who, (0, Usage(), 0))
        sums[who] = (num_requests + total.num_requests, usage + total.usage, cost_nanos + total.cost_nanos)
    return [
        {
            **dict(zip(by, who, strict=True)),
            "num_requests": num_requests,
            **asdict(usage),
            "cost": format_nanos(cost_nanos),
        }
        for who, (num_requests, usage, cost_nanos) in sorted(sums.items())
    ]


def format_rows(rows: Sequence[Mapping[str, Any]], form: Format) -> str:
    """Formats the rows as text, which ends with a line feed; CSV without rows is empty."""
    if form is Format.JSON:
        return json.dumps(list(rows), indent=1) + "\n"
    text = io.StringIO()
    if rows:
        writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)
    return text.getvalue()


def _cell(value: Any) -> Any:
    """A value of a CSV cell. NOTE: clients choose request ids, and a spreadsheet must not execute them as formulas."""
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULAS) else value
