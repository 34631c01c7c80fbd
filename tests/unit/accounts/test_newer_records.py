"""Records of a release that keeps more of keys and requests are read, and its file is written on."""

import sqlite3
from pathlib import Path

from tandem.accounts.charge import LedgerEntry
from tandem.accounts.key import AccountKey, KeyLimits, new_key
from tandem.accounts.ledger_file import LedgerFile
from tandem.accounts.ledger_query import LedgerQuery
from tandem.accounts.usage import Usage

TABLES = ("keys", "spent", "ledger", "checkpoints", "totals")


def entry(charge_id: str) -> LedgerEntry:
    return LedgerEntry(charge_id, "r", "k", "t", "m", 86_400_000, Usage(num_input=3, num_output=2), 5, "done")


def test_a_key_and_an_entry_that_say_more() -> None:
    """Regression: a field that this release does not know was a TypeError, and no key could be read."""
    key = new_key("a", 1, "t", limits=KeyLimits(concurrency=2))[0]
    said = key.as_json()
    said |= {"added": True, "limits": {**said["limits"], "images_per_minute": 7}}
    assert AccountKey.from_json(said, key.digest) == key
    told = entry("c").as_json()
    assert LedgerEntry.from_json({**told, "added": 1, "usage": {**told["usage"], "num_images": 1}}) == entry("c")


def test_a_file_whose_tables_have_another_column(tmp_path: Path) -> None:
    """Regression: values were written and read by their position in a row."""
    path = tmp_path / "accounts.db"
    LedgerFile(path, 100).close()
    with sqlite3.connect(path) as connection:
        for table in TABLES:
            connection.execute(f"ALTER TABLE {table} ADD COLUMN added INTEGER")
    connection.close()
    file = LedgerFile(path, 100)
    key = new_key("a", 1, "t")[0]
    file.put_key(key)
    file.put_checkpoints([entry("running")])
    file.add([entry("done")])
    assert file.bill_checkpoints() == 1
    assert file.all_keys() == [key]
    assert file.entries(LedgerQuery()) == [entry("done"), entry("running")]
    (total,) = file.totals(None, None)
    assert (total.num_requests, total.usage, total.cost_nanos) == (2, Usage(num_input=6, num_output=4), 10)
    assert file.spent_nanos("k") == 10
    file.close()
