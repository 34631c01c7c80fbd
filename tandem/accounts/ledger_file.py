"""The account store's SQLite file: keys, ledger entries, their totals and checkpoints of running requests.

Synchronous; any thread, one at a time; several processes may have it open. Invariant: an entry, its totals and its
key's spending are written together or not at all, and each entry once; an entry billed from a checkpoint is replaced by
the final one. Writing an entry deletes its checkpoint.
"""

import functools
import json
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tandem.accounts.charge import ChargeOutcome, LedgerEntry, Total
from tandem.accounts.errors import AccountsUnavailableError
from tandem.accounts.key import AccountKey
from tandem.accounts.key_cache import MAX_KEYS
from tandem.accounts.ledger_query import LedgerQuery
from tandem.accounts.store import KEPT_DAYS
from tandem.accounts.usage import Usage
from tandem.core.errors import ConfigurationError

_VERSION = 1
_BUSY_S = 5.0
_PRUNE_EVERY = 1000  # entries
_SCHEMA = """
CREATE TABLE IF NOT EXISTS keys (key_id TEXT PRIMARY KEY, digest TEXT NOT NULL, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS spent (key_id TEXT PRIMARY KEY, nanos INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS ledger (
  number INTEGER PRIMARY KEY AUTOINCREMENT, charge_id TEXT NOT NULL UNIQUE, at_ms INTEGER NOT NULL,
  key_id TEXT NOT NULL, tenant TEXT NOT NULL, value TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS ledger_at ON ledger (at_ms);
CREATE TABLE IF NOT EXISTS checkpoints (charge_id TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS totals (
  day TEXT, key_id TEXT, tenant TEXT, model TEXT, num_requests INTEGER, num_input INTEGER, num_written_5m INTEGER,
  num_written_1h INTEGER, num_read INTEGER, num_output INTEGER, cost_nanos INTEGER,
  PRIMARY KEY (day, key_id, tenant, model)) WITHOUT ROWID;
"""
_TOTAL_COLUMNS = (
    "day, key_id, tenant, model, num_requests, num_input, num_written_5m, num_written_1h, num_read, num_output, "
    "cost_nanos"
)
_ADD_TOTAL = f"""
INSERT INTO totals ({_TOTAL_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT DO UPDATE SET
num_requests = num_requests + excluded.num_requests, num_input = num_input + excluded.num_input,
num_written_5m = num_written_5m + excluded.num_written_5m, num_written_1h = num_written_1h + excluded.num_written_1h,
num_read = num_read + excluded.num_read, num_output = num_output + excluded.num_output,
cost_nanos = cost_nanos + excluded.cost_nanos
"""


class LedgerFile:
    """The open file. Without a path everything is in memory.

    Raises:
        ConfigurationError: it cannot be opened, or is not a ledger.
    """

    def __init__(self, path: Path | None, max_entries: int) -> None:
        self._max_entries = max_entries
        self._lock = threading.Lock()
        self._num_since_pruned = 0
        # NOTE: gateways ask again and again for all keys they know, of which few change.
        self._decoded = functools.lru_cache(2 * MAX_KEYS)(_decoded)
        try:
            self._connection = sqlite3.connect(
                ":memory:" if path is None else path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False
            )
            try:
                self._set_up()
            except sqlite3.Error:
                self._connection.close()
                raise
        except sqlite3.Error as error:
            raise ConfigurationError(f"accounts={str(path)!r} cannot be used as an SQLite file: {error}") from error

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    def put_key(self, key: AccountKey) -> None:
        """Adds a key or replaces its record."""
        with self._changing() as run:
            run.execute(
                "INSERT INTO keys (key_id, digest, value) VALUES (?, ?, ?) "
                "ON CONFLICT DO UPDATE SET value = excluded.value",
                (key.key_id, key.digest, json.dumps(key.as_json())),
            )

    def find_keys(self, key_ids: Sequence[str]) -> dict[str, AccountKey]:
        sql = f"SELECT key_id, digest, value FROM keys WHERE key_id IN ({','.join('?' * len(key_ids))})"
        with self._reading() as run:
            rows = run.execute(sql, tuple(key_ids)).fetchall()
        return {key_id: self._decoded(digest, value) for key_id, digest, value in rows}

    def all_keys(self) -> list[AccountKey]:
        with self._reading() as run:
            rows = run.execute("SELECT digest, value FROM keys ORDER BY rowid").fetchall()
        return [_decoded(digest, value) for digest, value in rows]

    def spent_nanos(self, key_id: str) -> int:
        with self._reading() as run:
            row = run.execute("SELECT nanos FROM spent WHERE key_id = ?", (key_id,)).fetchone()
        return 0 if row is None else int(row[0])

    def entry(self, charge_id: str) -> LedgerEntry | None:
        with self._reading() as run:
            return _entry(run, charge_id)

    def put_checkpoints(self, checkpoints: Sequence[LedgerEntry]) -> None:
        """Stores the usage so far of running requests, except those that have an entry already."""
        rows = [(entry.charge_id, json.dumps(entry.as_json()), entry.charge_id) for entry in checkpoints]
        with self._changing() as run:
            run.executemany(
                "INSERT OR REPLACE INTO checkpoints (charge_id, value) SELECT ?, ? WHERE NOT EXISTS "
                "(SELECT 1 FROM ledger WHERE charge_id = ?)",
                rows,
            )

    def bill_checkpoints(self) -> int:
        """Turns all remaining checkpoints into ledger entries; returns their number."""
        with self._changing() as run:
            values = run.execute("SELECT value FROM checkpoints ORDER BY rowid").fetchall()
            for (value,) in values:
                _add(run, LedgerEntry.from_json(json.loads(value)))
        return len(values)

    def add(self, entries: Sequence[LedgerEntry]) -> None:
        """Adds entries that are new; prunes the ledger now and then."""
        with self._changing() as run:
            for entry in entries:
                _add(run, entry)
            self._num_since_pruned += len(entries)
            if self._num_since_pruned >= _PRUNE_EVERY:
                self._num_since_pruned = 0
                _prune(run, self._max_entries)

    def entries(self, query: LedgerQuery) -> list[LedgerEntry]:
        conditions = {
            "at_ms >= ?": query.since_ms,
            "at_ms < ?": query.until_ms,
            "key_id = ?": query.key_id,
            "tenant = ?": query.tenant,
        }
        given = {text: value for text, value in conditions.items() if value is not None}
        where = f"WHERE {' AND '.join(given)}" if given else ""
        sql = f"SELECT value FROM ledger {where} ORDER BY number DESC LIMIT ?"
        with self._reading() as run:
            rows = run.execute(sql, (*given.values(), min(query.limit, self._max_entries))).fetchall()
        return [LedgerEntry.from_json(json.loads(value)) for (value,) in reversed(rows)]

    def totals(self, since_day: str | None, until_day: str | None) -> list[Total]:
        sql = f"SELECT {_TOTAL_COLUMNS} FROM totals WHERE day >= ? AND day <= ? ORDER BY day, key_id, tenant, model"
        with self._reading() as run:
            rows = run.execute(sql, (since_day or "", until_day or "~")).fetchall()
        return [_total(*row) for row in rows]

    def _set_up(self) -> None:
        run = self._connection
        run.execute("PRAGMA journal_mode = WAL")
        run.execute("PRAGMA synchronous = NORMAL")  # NOTE: survives our end; only the machine's may take the last ones
        (version,) = run.execute("PRAGMA user_version").fetchone()
        if version not in (0, _VERSION):
            raise sqlite3.DatabaseError(f"it has version {version}; this is {_VERSION}")
        run.executescript(_SCHEMA)
        run.execute(f"PRAGMA user_version = {_VERSION}")

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        try:
            with self._lock:
                yield self._connection
        except sqlite3.Error as error:
            raise AccountsUnavailableError(f"the file of accounts cannot be read: {error}", 1.0) from error

    @contextmanager
    def _changing(self) -> Iterator[sqlite3.Connection]:
        try:
            with self._lock:
                self._connection.execute("BEGIN IMMEDIATE")
                with self._connection:  # NOTE: commits, or rolls back
                    yield self._connection
        except sqlite3.Error as error:
            raise AccountsUnavailableError(f"the file of accounts cannot be written: {error}", 1.0) from error


def _decoded(digest: str, value: str) -> AccountKey:
    return AccountKey.from_json(json.loads(value), digest)


def _total(day: str, key_id: str, tenant: str, model: str, num_requests: int, *counts: int) -> Total:
    return Total(day, key_id, tenant, model, num_requests, Usage(*counts[:-1]), counts[-1])


def _entry(run: sqlite3.Connection, charge_id: str) -> LedgerEntry | None:
    row = run.execute("SELECT value FROM ledger WHERE charge_id = ?", (charge_id,)).fetchone()
    return None if row is None else LedgerEntry.from_json(json.loads(row[0]))


def _add(run: sqlite3.Connection, entry: LedgerEntry) -> None:
    """Adds an entry unless it exists; one billed from a checkpoint is replaced."""
    run.execute("DELETE FROM checkpoints WHERE charge_id = ?", (entry.charge_id,))
    former = _entry(run, entry.charge_id)
    if former is not None:
        if former.outcome != ChargeOutcome.EXPIRED or entry.outcome == ChargeOutcome.EXPIRED:
            return
        run.execute("DELETE FROM ledger WHERE charge_id = ?", (entry.charge_id,))
        _count(run, former, -1)
    run.execute(
        "INSERT INTO ledger (charge_id, at_ms, key_id, tenant, value) VALUES (?, ?, ?, ?, ?)",
        (entry.charge_id, entry.at_ms, entry.key_id, entry.tenant, json.dumps(entry.as_json())),
    )
    _count(run, entry, 1)


def _count(run: sqlite3.Connection, entry: LedgerEntry, sign: int) -> None:
    """Adds an entry to (or, with `sign` -1, removes it from) its key's spending and its totals."""
    run.execute(
        "INSERT INTO spent (key_id, nanos) VALUES (?, ?) ON CONFLICT DO UPDATE SET nanos = nanos + excluded.nanos",
        (entry.key_id, sign * entry.cost_nanos),
    )
    usage = entry.usage
    tokens = (usage.num_input, usage.num_written_5m, usage.num_written_1h, usage.num_read, usage.num_output)
    counts = (1, *tokens, entry.cost_nanos)
    run.execute(_ADD_TOTAL, (entry.day, entry.key_id, entry.tenant, entry.model, *(sign * count for count in counts)))


def _prune(run: sqlite3.Connection, max_entries: int) -> None:
    run.execute("DELETE FROM ledger WHERE number <= (SELECT MAX(number) FROM ledger) - ?", (max_entries,))
    run.execute("DELETE FROM totals WHERE day < date('now', ?)", (f"-{KEPT_DAYS} days",))
