"""Settlements on their way to the store, in order, whatever becomes of it meanwhile.

Invariant: what was used is never forgotten while this process lives, nor after it where there is a journal; and it is
counted once. Bounded: `is_full` tells when no more must be begun.
"""

import asyncio
import logging
from collections import deque
from dataclasses import dataclass, field

from tandem.accounts.charge import Settlement
from tandem.accounts.errors import AccountsUnavailableError
from tandem.accounts.journal import Journal
from tandem.accounts.store import Till

MAX_WAITING = 50_000
NUM_SENDERS = 8
_RETRY_S = 0.5

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Item:
    settlement: Settlement
    has_it: asyncio.Event = field(default_factory=asyncio.Event)
    is_kept: bool = False  # in the journal


class Settlements:
    """`add` from the event loop; a few tasks tell the store."""

    def __init__(self, till: Till, journal: Journal | None) -> None:
        self._till = till
        self._journal = journal
        self._waiting: deque[_Item] = deque()
        self._num_sending = 0
        self._is_journal_empty = True
        self._has_work = asyncio.Event()
        self._is_done = asyncio.Event()
        self._is_done.set()
        self._is_away = False
        self._senders: list[asyncio.Task[None]] = []

    @property
    def num_waiting(self) -> int:
        """Not taken by the store yet."""
        return len(self._waiting) + self._num_sending

    @property
    def is_full(self) -> bool:
        return self.num_waiting >= MAX_WAITING

    def start(self) -> None:
        """With what an earlier process left first."""
        left = [] if self._journal is None else self._journal.read()
        self._is_journal_empty = not left
        for settlement in left:
            self._queue(_Item(settlement, is_kept=True))
        self._senders = [asyncio.create_task(self._run(), name="settlements") for _ in range(NUM_SENDERS)]

    async def close(self, timeout_s: float = 2.0) -> None:
        """Tell the store what waits, if that is quick; the journal keeps the rest."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._is_done.wait()
        except TimeoutError:
            kept = "in the journal" if self._journal is not None else "lost: there is no journal"
            _logger.error("%d settlements were not taken by the store; they are %s", self.num_waiting, kept)
        for sender in self._senders:
            sender.cancel()
        await asyncio.gather(*self._senders, return_exceptions=True)
        self._keep_all()

    def add(self, settlement: Settlement) -> asyncio.Event:
        """What is set once the store has it."""
        item = _Item(settlement)
        self._queue(item)
        if self._is_away:
            self._keep_all()
        return item.has_it

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
        """Whether the store has it now; else it waits again."""
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
            item.has_it.set()
            self._finish()
        else:
            self._keep_all()
        return is_taken

    async def _tell(self, settlement: Settlement) -> bool:
        try:
            await self._till.settle(settlement)
        except AccountsUnavailableError as error:
            if not self._is_away:
                _logger.warning("settlements wait until the store of accounts is back: %s", error)
            self._is_away = True
            return False
        if self._is_away:
            _logger.info("the store of accounts is back and takes settlements")
        self._is_away = False
        return True

    def _keep_all(self) -> None:
        """Put what waits into the journal, each once."""
        items = [item for item in self._waiting if not item.is_kept]
        if self._journal is None or not items:
            return
        try:
            self._journal.add([item.settlement for item in items])
        except OSError as error:
            _logger.error("%d settlements are in memory only: %s", len(items), error)
            return
        self._is_journal_empty = False
        for item in items:
            item.is_kept = True

    def _finish(self) -> None:
        if self.num_waiting:
            return
        self._is_done.set()
        if self._journal is not None and not self._is_journal_empty:
            self._journal.clear()
            self._is_journal_empty = True
