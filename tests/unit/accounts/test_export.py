"""The ledger as CSV and JSON: exact amounts, and nothing that a spreadsheet would run."""

import csv
import io
import json

import pytest

from tandem.accounts.charge import LedgerEntry, Total
from tandem.accounts.export import Format, entry_rows, format_rows, total_rows
from tandem.accounts.ledger_query import LedgerQuery
from tandem.accounts.usage import Usage
from tandem.core.errors import InvalidRequestError

ENTRIES = [
    LedgerEntry("c1", "=1+1", "k", 'a"b,c', "m", 1_700_000_000_123, Usage(1, 2, 3, 4, 5), 1_234_567_890, "done"),
    LedgerEntry("c2", "r2", "k", "t", "m", 1_700_000_000_999, Usage(), 0, "refunded"),
]
TOTALS = [
    Total("2026-01-01", "k1", "t", "m", 2, Usage(1, 0, 0, 0, 1), 10),
    Total("2026-01-02", "k1", "t", "m", 1, Usage(2, 0, 0, 0, 1), 5),
    Total("2026-01-02", "k2", "t", "n", 1, Usage(4, 0, 0, 0, 1), 3),
]


def test_csv_is_read_back() -> None:
    rows = list(csv.DictReader(io.StringIO(format_rows(entry_rows(ENTRIES), Format.CSV))))
    assert [row["request_id"] for row in rows] == ["'=1+1", "r2"]
    assert (rows[0]["tenant"], rows[0]["cost"], rows[0]["time"]) == (
        'a"b,c',
        "1.23456789",
        "2023-11-14T22:13:20.123+00:00",
    )
    assert [rows[0][f"num_{name}"] for name in ("input", "written_5m", "written_1h", "read", "output")] == list("12345")


def test_json_is_read_back() -> None:
    assert json.loads(format_rows(entry_rows(ENTRIES), Format.JSON))[0]["request_id"] == "=1+1"
    assert json.loads(format_rows([], Format.JSON)) == []
    assert format_rows([], Format.CSV) == ""


def test_totals_are_added_up_by_what_is_asked_for() -> None:
    assert [(row["day"], row["num_requests"]) for row in total_rows(TOTALS, ("day",))] == [
        ("2026-01-01", 2),
        ("2026-01-02", 2),
    ]
    (tenant,) = total_rows(TOTALS, ("tenant",))
    assert (tenant["num_requests"], tenant["num_input"], tenant["cost"]) == (4, 7, "0.000000018")
    assert len(total_rows(TOTALS)) == 3


def test_days_must_be_days() -> None:
    for day in ("2026-13-01", "20261126", "2026-W48-4", "yesterday", ""):
        with pytest.raises(InvalidRequestError, match="since_day"):
            LedgerQuery(since_day=day)
        with pytest.raises(InvalidRequestError, match="until_day"):
            LedgerQuery(until_day=day)
    with pytest.raises(InvalidRequestError, match="until_day='9999-12-31'"):
        LedgerQuery(until_day="9999-12-31")
    query = LedgerQuery("2026-01-01", "2026-01-01")
    assert query.since_ms is not None
    assert query.until_ms == query.since_ms + 24 * 3600 * 1000
