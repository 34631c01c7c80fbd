"""Queue that delivers settlements, the bills of ended requests, to the account store, across its outages.

The oldest come first, several at once. Invariant: usage is never lost while this process lives, nor at its end where
there is a journal; and it is counted once. Recently accepted settlements can be resent, since the store may lose them
in a failover. Bounded: when `is_full`, no more requests may begin.
"""

import asyncio
import logging
from collections import deque
from dataclasses import dataclass, field

from tandem.accounts.charge import ChargeSettlement
from tandem.accounts.errors import AccountsUnavailableError
from tandem.accounts.journal import Journal
from tandem.accounts.store import ChargeStore
from tandem.core.clock import Clock, SystemClock

MAX_WAITING = 50_000  # settlements; then `is_full`
# Number and age of accepted settlements that can be resent. NOTE: far below the day for which a store knows what it has
MAX_RESENT, RESENT_S = 10_000, 600.0
NUM_SENDERS = 8
_RETRY_S = 0.5

_logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Item:
    """A queued settlement. `has_it`: set once the store has accepted it."""

    settlement: ChargeSettlement
    has_it: asyncio.Event = field(default_factory=asyncio.Event)


class Settlements:
    """Queue of settlements: `add` from the event loop; a few tasks send them to the store."""

    def __init__(self, store: ChargeStore, journal: Journal | None, clock: Clock | None = None) -> None:
        self._store = store
        self._journal = journal
        self._clock = clock or SystemClock()
        self._accepted: deque[tuple[float, ChargeSettlement]] = deque(maxlen=MAX_RESENT)
        self._waiting: deque[_Item] = deque()
        self._unsaved: dict[_Item, None] = {}  # what neither the store nor the journal has, in order
        self._num_sending = 0
        self._is_journal_empty = True
        self._is_journal_failing = False
        self._has_work = asyncio.Event()
        self._is_done = asyncio.Event()
        self._is_done.set()
        self._is_away = False
        self._senders: list[asyncio.Task[None]] = []
        self._keeper: asyncio.Task[None] | None = None

    @property
    def num_waiting(self) -> int:
        """Settlements that the store has not accepted yet."""
        return len(self._waiting) + self._num_sending

    @property
    def num_accepted(self) -> int:
        """Accepted settlements that can be resent."""
        return len(self._accepted)

    @property
    def is_full(self) -> bool:
        return self.num_waiting >= MAX_WAITING

    def start(self) -> None:
        """Starts sending, beginning with the settlements that an earlier process left in the journal."""
        left = [] if self._journal is None else self._journal.read()
        self._is_journal_empty = not left
        for settlement in left:
            self._queue(_Item(settlement))
        self._senders = [asyncio.create_task(self._run(), name="settlements") for _ in range(NUM_SENDERS)]

    async def close(self, timeout_s: float = 2.0) -> None:
        """Waits up to `timeout_s` for the store; the rest goes to the journal."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._is_done.wait()
        except TimeoutError:
            kept = "for the journal" if self._journal is not None else "lost: there is no journal"
            _logger.error("%d settlements were not taken by the store; they are %s", self.num_waiting, kept)
        for sender in self._senders:
            sender.cancel()
        await asyncio.gather(*self._senders, return_exceptions=True)
        if self._keeper is not None:
            await self._keeper
        if self._journal is not None and self._unsaved and not await self._write(self._journal):
            _logger.error("%d settlements are lost: the journal cannot be written", len(self._unsaved))

    def add(self, settlement: ChargeSettlement) -> asyncio.Event:
        """Queues a settlement; returns an event that is set once the store has accepted it."""
        item = _Item(settlement)
        self._unsaved[item] = None
        self._queue(item)
        if self._is_away and not self._is_journal_failing:  # NOTE: if it is, only the senders try again, now and then
            self._keep()
        return item.has_it

    def resend(self) -> int:
        """Resends the recently accepted settlements and returns their number; the store ignores those it still has."""
        self.forget_accepted(may_be_lost=True)
        settlements = [settlement for _, settlement in self._accepted]
        self._accepted.clear()
        for settlement in settlements:
            self.add(settlement)
        return len(settlements)

    def forget_accepted(self, *, may_be_lost: bool) -> None:
        """Drops accepted settlements that are too old to resend; all, if the store cannot lose any."""
        oldest_s = self._clock.now_s() - RESENT_S
        while self._accepted and (not may_be_lost or self._accepted[0][0] < oldest_s):
            self._accepted.popleft()

    def _queue(self, item: _Item) -> None:
        self._waiting.append(item)
        self._is_done.clear()
        self._has_work.set()

    async def _run(self) -> None:
        while True:
            await self._has_work.wait()
            if not self._waiting:
                self._has_work.clear()
            elif not await self._send(self._waiting.popleft()):
                await asyncio.sleep(_RETRY_S)

    async def _send(self, item: _Item) -> bool:
        """Returns whether the store has accepted the settlement; otherwise it is queued again."""
        self._num_sending += 1
        is_taken = False
        try:
            is_taken = await self._tell(item.settlement)
        finally:
            self._num_sending -= 1
            if not is_taken:
                self._waiting.appendleft(item)
                self._has_work.set()  # NOTE: another sender may have found nothing meanwhile
        if is_taken:
            self._unsaved.pop(item, None)
            self._accepted.append((self._clock.now_s(), item.settlement))
            item.has_it.set()
            self._finish()
        else:
            self._keep()
        return is_taken

    async def _tell(self, settlement: ChargeSettlement) -> bool:
        """Sends a settlement once; returns whether the store has accepted it."""
        try:
            await self._store.settle(settlement)
        except AccountsUnavailableError as error:
            if not self._is_away:
                _logger.warning("settlements wait until the store of accounts is back: %s", error)
            self._is_away = True
            return False
        if self._is_away:
            _logger.info("the store of accounts is back and takes settlements")
        self._is_away = False
        return True

    def _finish(self) -> None:
        if self.num_waiting:
            return
        self._is_done.set()
        if not self._is_journal_empty:
            self._keep()

    def _keep(self) -> None:
        """Starts a task that updates the journal, unless one runs."""
        if self._journal is not None and (self._keeper is None or self._keeper.done()):
            self._keeper = asyncio.create_task(self._update(self._journal), name="journal of settlements")

    async def _update(self, journal: Journal) -> None:
        """While the store is unavailable, adds waiting settlements; once none waits, clears the journal."""
        while self._is_away and self._unsaved:
            if not await self._write(journal):
                break
        if not self.num_waiting and not self._is_journal_empty:
            self._clear(journal)

    async def _write(self, journal: Journal) -> bool:
        """Writes the settlements that are in memory only; returns whether that succeeded."""
        items = tuple(self._unsaved)
        self._is_journal_empty = False
        try:
            await asyncio.to_thread(journal.add, [item.settlement for item in items])
        except OSError as error:
            self._say_failing(f"{len(items)} settlements are in memory only: {error}")
            return False
        self._is_journal_failing = False
        for item in items:
            self._unsaved.pop(item, None)
        return True

    def _clear(self, journal: Journal) -> None:
        try:
            journal.clear()
        except OSError as error:
            self._say_failing(f"the journal still holds settlements that the store has: {error}")
            return
        self._is_journal_empty = True
        self._is_journal_failing = False

    def _say_failing(self, what: str) -> None:
        if not self._is_journal_failing:
            _logger.error(what)
        self._is_journal_failing = True
