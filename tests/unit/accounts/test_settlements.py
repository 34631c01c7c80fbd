"""Settlements reach the store once, in spite of its absences and of the end of this process."""

import asyncio
import errno
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tandem.accounts.charge import Charge, ChargeSettlement, LedgerEntry
from tandem.accounts.errors import AccountsUnavailableError
from tandem.accounts.journal import Journal
from tandem.accounts.rate_limit_state import RateLimitState
from tandem.accounts.settlements import NUM_SENDERS, RESENT_S, Settlements
from tandem.accounts.store import Spending
from tandem.accounts.usage import Usage
from tandem.core.clock import ManualClock
from tandem.core.errors import ConfigurationError


def settlement(number: int) -> ChargeSettlement:
    entry = LedgerEntry(f"c{number}", "r", "k", "t", "m", number, Usage(1, 2, 3, 4, 5), 7, "done")
    return ChargeSettlement(entry, (None, 5, None), (1, 2, 3), number % 2 == 0, (1, 1, 1))


@dataclass
class FlakyTill:
    """Takes settlements while `is_there`."""

    is_there: bool = True
    taken: list[ChargeSettlement] = field(default_factory=list)
    num_refused: int = 0

    async def reserve(self, charge: Charge) -> RateLimitState:
        raise NotImplementedError

    async def settle(self, settlement: ChargeSettlement) -> None:
        await asyncio.sleep(0)
        if not self.is_there:
            self.num_refused += 1
            raise AccountsUnavailableError("away")
        self.taken.append(settlement)

    async def renew(self, renewals: object) -> None: ...

    async def expire(self) -> None: ...

    async def incarnation(self) -> str:
        raise NotImplementedError

    async def spending(self, key_id: str) -> Spending:
        raise NotImplementedError


async def until(settlements: Settlements, num_waiting: int) -> None:
    async with asyncio.timeout(10):
        while settlements.num_waiting != num_waiting:
            await asyncio.sleep(0.01)


async def until_kept(journal: Journal, num_settlements: int) -> None:
    async with asyncio.timeout(10):
        while len(journal.read()) != num_settlements:
            await asyncio.sleep(0.01)


def test_each_is_told_once_and_says_so() -> None:
    async def run() -> None:
        till = FlakyTill()
        settlements = Settlements(till, None)
        settlements.start()
        events = [settlements.add(settlement(number)) for number in range(100)]
        await until(settlements, 0)
        assert all(event.is_set() for event in events)
        assert sorted(item.entry.at_ms for item in till.taken) == list(range(100))
        await settlements.close()

    asyncio.run(run())


def test_they_wait_while_the_store_is_away(tmp_path: Path) -> None:
    async def run() -> None:
        till, journal = FlakyTill(is_there=False), Journal(tmp_path / "journal")
        settlements = Settlements(till, journal)
        settlements.start()
        for number in range(20):
            settlements.add(settlement(number))
        await until_kept(journal, 20)
        settlements.add(settlement(20))
        await until_kept(journal, 21)
        assert sorted(item.entry.at_ms for item in journal.read()) == list(range(21))
        till.is_there = True
        await until(settlements, 0)
        assert sorted(item.entry.at_ms for item in till.taken) == list(range(21))
        await settlements.close()
        assert journal.read() == []

    asyncio.run(run())


def test_one_that_failed_alone_is_told_again() -> None:
    """The other senders went to sleep, with nothing to do, while it was on its way; none woke up for it again."""

    async def run() -> None:
        till = FlakyTill(is_there=False)
        settlements = Settlements(till, None)
        settlements.start()
        settlements.add(settlement(1))
        async with asyncio.timeout(10):
            while not till.num_refused:
                await asyncio.sleep(0)
        till.is_there = True
        await until(settlements, 0)
        assert till.taken == [settlement(1)]
        await settlements.close()

    asyncio.run(run())


def test_the_journal_outlives_the_process(tmp_path: Path) -> None:
    async def first() -> None:
        settlements = Settlements(FlakyTill(is_there=False), Journal(tmp_path / "journal"))
        settlements.start()
        for number in range(10):
            settlements.add(settlement(number))
        await settlements.close(timeout_s=0.05)

    async def second() -> None:
        till = FlakyTill()
        settlements = Settlements(till, Journal(tmp_path / "journal"))
        settlements.start()
        await until(settlements, 0)
        assert sorted(till.taken, key=lambda item: item.entry.at_ms) == [settlement(number) for number in range(10)]
        await settlements.close()

    asyncio.run(first())
    with (tmp_path / "journal").open("a") as file:
        file.write('{"entry": {"charge_id"')
    asyncio.run(second())
    assert Journal(tmp_path / "journal").read() == []


def test_what_follows_a_line_that_was_cut_off_is_found(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    Journal(path).add([settlement(1)])
    whole = path.read_bytes()
    path.write_bytes(whole + whole[: len(whole) // 2])
    journal = Journal(path)
    journal.add([settlement(2), settlement(3)])
    journal.add([settlement(4)])
    assert journal.read() == [settlement(number) for number in range(1, 5)]
    assert path.read_text().count("\n") == 5


def test_a_burst_is_kept_in_few_writes_that_hold_up_no_other_request(tmp_path: Path) -> None:
    """Each settlement looked at all that waited, and waited for the disk in the event loop."""

    class Counting(Journal):
        def __init__(self, path: Path) -> None:
            super().__init__(path)
            self.num_writes = 0

        def add(self, settlements: Sequence[ChargeSettlement]) -> None:
            assert threading.current_thread() is not threading.main_thread()
            self.num_writes += 1
            super().add(settlements)

    async def run() -> None:
        journal = Counting(tmp_path / "journal")
        settlements = Settlements(FlakyTill(is_there=False), journal)
        settlements.start()
        settlements.add(settlement(0))
        await until_kept(journal, 1)
        for number in range(1, 500):
            settlements.add(settlement(number))
        await until_kept(journal, 500)
        await settlements.close(timeout_s=0)
        assert journal.num_writes <= 3
        assert sorted(item.entry.at_ms for item in journal.read()) == list(range(500))

    asyncio.run(run())


def test_a_journal_that_cannot_be_cleared_stops_no_settlement(tmp_path: Path) -> None:
    """Each idle moment ended another sender, until none was left to tell the store anything."""

    class ReadOnly(Journal):
        def clear(self) -> None:
            raise OSError(errno.EROFS, "Read-only file system")

    async def run() -> None:
        till, journal = FlakyTill(is_there=False), ReadOnly(tmp_path / "journal")
        settlements = Settlements(till, journal)
        settlements.start()
        settlements.add(settlement(0))
        await until_kept(journal, 1)
        till.is_there = True
        await until(settlements, 0)
        for number in range(1, 2 * NUM_SENDERS):
            settlements.add(settlement(number))
            await until(settlements, 0)
        assert len(till.taken) == 2 * NUM_SENDERS
        await settlements.close()

    asyncio.run(run())


def test_a_journal_that_cannot_be_written_for_a_while_has_all_in_the_end(tmp_path: Path) -> None:
    class Full(Journal):
        is_full = True

        def add(self, settlements: Sequence[ChargeSettlement]) -> None:
            if self.is_full:
                raise OSError(errno.ENOSPC, "No space left on device")
            super().add(settlements)

    async def run() -> None:
        till, journal = FlakyTill(is_there=False), Full(tmp_path / "journal")
        settlements = Settlements(till, journal)
        settlements.start()
        for number in range(20):
            settlements.add(settlement(number))
        async with asyncio.timeout(10):
            while not till.num_refused:
                await asyncio.sleep(0)
        journal.is_full = False
        await settlements.close(timeout_s=0)
        assert sorted(item.entry.at_ms for item in journal.read()) == list(range(20))

    asyncio.run(run())


def test_a_journal_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="accounts_journal"):
        Journal(tmp_path / "missing" / "journal")


def test_what_was_taken_lately_can_be_told_again() -> None:
    async def run() -> None:
        till, clock = FlakyTill(), ManualClock()
        settlements = Settlements(till, None, clock)
        settlements.start()
        for number in range(3):
            clock.advance(RESENT_S / 2 + 1)
            settlements.add(settlement(number))
            await until(settlements, 0)
        assert settlements.resend() == 2
        await until(settlements, 0)
        assert [taken.entry.charge_id for taken in till.taken] == ["c0", "c1", "c2", "c1", "c2"]
        till.is_there = False
        assert settlements.resend() == 2
        assert settlements.num_waiting == 2
        till.is_there = True
        await until(settlements, 0)
        await settlements.close()

    asyncio.run(run())


def test_what_is_told_again_is_forgotten_when_it_is_old_or_can_not_be_lost() -> None:
    """Regression: ten thousand settlements were kept for ever, also where the store is this process."""

    async def run() -> None:
        till, clock = FlakyTill(), ManualClock()
        settlements = Settlements(till, None, clock)
        settlements.start()
        for number in range(3):
            clock.advance(RESENT_S / 2 + 1)
            settlements.add(settlement(number))
            await until(settlements, 0)
        settlements.forget_accepted(may_be_lost=True)
        assert settlements.num_accepted == 2
        settlements.forget_accepted(may_be_lost=False)
        assert settlements.num_accepted == settlements.resend() == 0
        await settlements.close()

    asyncio.run(run())
