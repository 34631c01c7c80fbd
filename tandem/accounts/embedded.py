"""Account store of a single gateway: balances in memory, keys and ledger in a file; `store` describes its methods.

Invariant: a lock ensures that only one gateway uses the file; `tandem keys` and `tandem usage` may open it too.
Requests do not wait for entries to be written: a thread does that a moment later, at the latest on `close`.
Checkpoints of running requests are written too: `start` bills those that an earlier gateway left.
"""

import asyncio
import fcntl
import logging
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

from tandem.accounts.balance import Balance, Rates
from tandem.accounts.charge import Charge, ChargeOutcome, ChargeSettlement, LedgerEntry, Renewal, Total
from tandem.accounts.errors import AccountsUnavailableError
from tandem.accounts.key import AccountKey
from tandem.accounts.ledger_file import LedgerFile
from tandem.accounts.ledger_query import MAX_ENTRIES, LedgerQuery
from tandem.accounts.rate_limit_state import RateLimitState
from tandem.accounts.refusals import revoked
from tandem.accounts.store import LEASE_S, Spending
from tandem.core.clock import Clock
from tandem.core.errors import ConfigurationError

MAX_UNWRITTEN = 100_000  # entries that wait for the file
_REMEMBERED = 10_000  # charges that were settled; the file knows the others
_RETRY_S = 1.0

_logger = logging.getLogger(__name__)


class EmbeddedAccounts:
    """An `AccountStore` for one gateway. `path`: the file of its keys and ledger; None: in memory only.

    Raises:
        ConfigurationError: the file cannot be used, or `start` finds another gateway using it.
    """

    def __init__(
        self, path: Path | None, clock: Clock, *, lease_s: float = LEASE_S, max_entries: int = MAX_ENTRIES
    ) -> None:
        self._path = path
        self._clock = clock
        self._lease_ms = round(lease_s * 1000)
        self._file = LedgerFile(path, max_entries)
        self._balances: dict[str, Balance] = {}
        self._revoked: set[str] = set()
        self._settled: OrderedDict[str, None] = OrderedDict()
        self._lock: TextIO | None = None
        self._unwritten: list[LedgerEntry] = []
        self._wake = threading.Condition()
        self._is_closing = False
        self._is_failing = False
        self._writer: threading.Thread | None = None

    def start(self) -> None:
        if self._path is not None:
            self._lock = _locked(self._path)
        if num_billed := self._file.bill_checkpoints():
            _logger.warning("%d requests that the last gateway left are billed for what they had used", num_billed)
        self._writer = threading.Thread(target=self._write, name="ledger", daemon=True)
        self._writer.start()

    async def close(self) -> None:
        with self._wake:
            self._is_closing = True
            self._wake.notify_all()
        if self._writer is not None:
            await asyncio.to_thread(self._writer.join)
        self._file.close()
        if self._lock is not None:
            self._lock.close()

    async def add_key(self, key: AccountKey) -> None:
        await asyncio.to_thread(self._file.put_key, key)

    async def find_keys(self, key_ids: Sequence[str]) -> Mapping[str, AccountKey]:
        found = await asyncio.to_thread(self._file.find_keys, key_ids)
        self._revoked |= {key.key_id for key in found.values() if not key.is_live}
        return found

    async def all_keys(self) -> Sequence[AccountKey]:
        return await asyncio.to_thread(self._file.all_keys)

    async def revoke_key(self, key_id: str, now_s: int) -> bool:
        key = (await self.find_keys([key_id])).get(key_id)
        if key is not None and key.is_live:
            self._revoked.add(key_id)
            await asyncio.to_thread(self._file.put_key, key.revoked(now_s))
        return key is not None

    async def reserve(self, charge: Charge) -> RateLimitState:
        if charge.key.key_id in self._revoked:
            raise revoked()
        self._require_room()
        now_ms = self._now_ms()
        balance = self._balance(charge.key.key_id, charge.key.limits.rates, now_ms)
        return balance.reserve(charge, now_ms, self._lease_ms)

    async def settle(self, settlement: ChargeSettlement) -> None:
        entry, now_ms = settlement.entry, self._now_ms()
        if entry.charge_id in self._settled:
            return
        balance = self._balance(entry.key_id, settlement.rates, now_ms)
        billed = None if balance.has(entry.charge_id) else self._file.entry(entry.charge_id)
        if billed is not None and billed.outcome != ChargeOutcome.EXPIRED:
            return
        self._require_room()
        self._settled[entry.charge_id] = None
        if len(self._settled) > _REMEMBERED:
            self._settled.popitem(last=False)
        balance.settle(settlement, now_ms)
        balance.spent_nanos -= 0 if billed is None else billed.cost_nanos
        with self._wake:
            self._unwritten.append(entry)
            self._wake.notify_all()

    async def renew(self, renewals: Sequence[Renewal]) -> None:
        now_ms = self._now_ms()
        for renewal in renewals:
            charge = renewal.charge
            is_lost = renewal.is_granted and charge.charge_id not in self._settled
            balance = self._balance(charge.key.key_id, charge.key.limits.rates, now_ms)
            balance.renew(charge, now_ms, self._lease_ms, is_granted=is_lost)
        checkpoints = [renewal.checkpoint for renewal in renewals if renewal.checkpoint is not None]
        if checkpoints:
            await asyncio.to_thread(self._file.put_checkpoints, checkpoints)

    async def expire(self) -> None:
        """NOTE: checkpoints are not billed: this gateway still settles expired charges; only its death leaves some."""
        for balance in self._balances.values():
            balance.expire(self._now_ms())

    async def spending(self, key_id: str) -> Spending:
        balance = self._balances.get(key_id)
        if balance is None:
            return Spending(await asyncio.to_thread(self._file.spent_nanos, key_id), 0, 0)
        balance.expire(self._now_ms())
        return Spending(balance.spent_nanos, balance.held_nanos, balance.num_open)

    async def incarnation(self) -> str:
        """Empty: the store is this process and cannot be replaced."""
        return ""

    async def entries(self, query: LedgerQuery) -> Sequence[LedgerEntry]:
        await asyncio.to_thread(self._drain)
        return await asyncio.to_thread(self._file.entries, query)

    async def totals(self, since_day: str | None = None, until_day: str | None = None) -> Sequence[Total]:
        await asyncio.to_thread(self._drain)
        return await asyncio.to_thread(self._file.totals, since_day, until_day)

    def _require_room(self) -> None:
        """Raises AccountsUnavailableError while as many entries as may be wait for the file.

        NOTE: settlements wait too, since gateways that serve without accounts ignore a refused reservation.
        """
        if len(self._unwritten) >= MAX_UNWRITTEN:
            raise AccountsUnavailableError("the ledger cannot be written, so nothing more is served", 1.0)

    def _balance(self, key_id: str, rates: Rates, now_ms: int) -> Balance:
        """NOTE: created before any entry of the key waits to be written, so the file's sum is complete."""
        balance = self._balances.get(key_id)
        if balance is None:
            balance = self._balances[key_id] = Balance(rates, self._file.spent_nanos(key_id), now_ms)
        return balance

    def _now_ms(self) -> int:
        return int(self._clock.now_s() * 1000)

    def _write(self) -> None:
        """Loop of the writer thread: writes all waiting entries in one transaction, until closed."""
        while True:
            with self._wake:
                while not self._unwritten and not self._is_closing:
                    self._wake.wait()
                entries, is_last_attempt = tuple(self._unwritten), self._is_closing
            if not entries:
                return
            if self._try_to_write(entries):
                with self._wake:
                    del self._unwritten[: len(entries)]
                    self._wake.notify_all()
            elif is_last_attempt:
                _logger.error("%d entries of the ledger are lost: its file cannot be written", len(entries))
                return

    def _try_to_write(self, entries: Sequence[LedgerEntry]) -> bool:
        try:
            self._file.add(entries)
        except AccountsUnavailableError as error:
            if not self._is_failing:
                _logger.error("the ledger is kept in memory for now: %s", error)
            self._is_failing = True
            with self._wake:
                self._wake.wait_for(lambda: self._is_closing, _RETRY_S)
            return False
        self._is_failing = False
        return True

    def _drain(self) -> None:
        with self._wake:
            self._wake.wait_for(lambda: not self._unwritten or self._writer is None, _RETRY_S)


def _locked(path: Path) -> TextIO:
    """The lock file; the lock is held until it is closed or this process ends."""
    lock = path.with_name(f"{path.name}.lock").open("a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise ConfigurationError(
            f"accounts={str(path)!r} is used by another gateway; several gateways share accounts in Redis "
            "(--accounts redis://host:port)"
        ) from error
    return lock
