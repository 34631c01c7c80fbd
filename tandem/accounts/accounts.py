"""Accounts as a gateway uses them: looks up API keys, reserves the cost of requests, and settles their actual use.

A reservation sets aside the most that a request may use; it lasts for a lease, which is renewed while the request runs.
Invariant: each `Reservation` is settled once; a settlement (the bill) is resent until the store has accepted it. No
HTTP here.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from tandem.accounts.charge import Charge, ChargeOutcome, ChargeSettlement, LedgerEntry, Renewal
from tandem.accounts.errors import AccountsUnavailableError, KeyRefusedError
from tandem.accounts.journal import Journal
from tandem.accounts.key import AccountKey, key_id_of
from tandem.accounts.key_cache import REFRESH_S, KeyCache
from tandem.accounts.prices import Prices
from tandem.accounts.rate_limit_state import RateLimitState
from tandem.accounts.settlements import Settlements
from tandem.accounts.store import LEASE_S, AccountStore
from tandem.accounts.usage import Usage
from tandem.core.clock import Clock
from tandem.core.errors import TandemError
from tandem.core.machine import random_id, wall_s

_logger = logging.getLogger(__name__)

SETTLE_WAIT_S = 0.25  # for which the end of a request waits for the store
RENEWALS_PER_LEASE = 12  # NOTE: three would keep a lease; usage after a killed gateway's last renewal is not billed


@dataclass(slots=True)
class Reservation:
    """The reservation of one request: the most it may use, set aside in the store.

    Args:
        delivered: returns the usage delivered to the client so far, which is billed if this process dies before the
            request ends.
        rate_limits: None until the store has granted it.
    """

    charge: Charge
    request_id: str
    model: str
    delivered: Callable[[], Usage] = Usage
    rate_limits: RateLimitState | None = None
    is_settled: bool = False


class Accounts:
    """Keys and billing of one gateway. Started and closed once; owned by one event loop.

    Args:
        may_be_lost: while the store is unavailable, requests are served without limits but recorded; else refused.
        wall: returns the time in seconds since the epoch.
    """

    def __init__(
        self,
        store: AccountStore,
        prices: Prices,
        clock: Clock,
        *,
        may_be_lost: bool = False,
        journal: Journal | None = None,
        wall: Callable[[], float] = wall_s,
        lease_s: float = LEASE_S,
    ) -> None:
        self.store = store
        self.prices = prices
        self.settlements = Settlements(store, journal, clock)
        self._keys = KeyCache(store, clock, may_be_stale=may_be_lost)
        self._may_be_lost = may_be_lost
        self._wall = wall
        self._renew_s = lease_s / RENEWALS_PER_LEASE
        self._open: dict[str, Reservation] = {}
        self._incarnation: str | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Starts the store and the background tasks. Raises as the store's `start`."""
        self.store.start()
        self.settlements.start()
        self._tasks = [
            asyncio.create_task(self._refresh(), name="keys"),
            asyncio.create_task(self._renew(), name="leases"),
        ]

    async def close(self) -> None:
        """Ends tasks and the store; all requests must have ended."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.settlements.close()
        await self.store.close()

    async def authenticate(self, secret: str | None) -> AccountKey:
        """Returns the key that a secret belongs to.

        Raises:
            KeyRefusedError: the secret is missing, unknown or revoked.
            AccountsUnavailableError: the store cannot be asked.
        """
        if not secret:
            raise KeyRefusedError("an API key is needed: send it as `Authorization: Bearer …` or `x-api-key: …`")
        key_id = key_id_of(secret)
        key = None if key_id is None else await self._keys.find(key_id)
        if key is None or not key.matches(secret):
            raise KeyRefusedError("this API key is not known here; check it, or ask for another one")
        if not key.is_live:
            raise KeyRefusedError("this API key was revoked; ask for another one")
        return key

    def charge(self, key: AccountKey, request_id: str, model: str, most: Usage) -> Reservation:
        """Computes the reservation for the most a request may use; `reserve` then makes it in the store."""
        charge_id = random_id()
        return Reservation(
            Charge.of(charge_id, key, most, self.prices.most_expensive.cost_nanos(most)), request_id, model
        )

    async def reserve(self, reservation: Reservation) -> None:
        """Makes a reservation. `settle` it afterwards in every case, also when this call was cancelled.

        Raises:
            TandemError: as `ChargeStore.reserve`; it is then settled already.
            AccountsUnavailableError: the store is unavailable, and `may_be_lost` is False.
        """
        if self.settlements.is_full:
            reservation.is_settled = True
            raise AccountsUnavailableError("too many settlements wait for the store of accounts", 1.0)
        self._open[reservation.charge.charge_id] = reservation
        try:
            reservation.rate_limits = await self.store.reserve(reservation.charge)
        except AccountsUnavailableError as error:
            if self._may_be_lost:
                return
            if error.may_have_happened:
                self.settle(reservation, Usage(), ChargeOutcome.REFUNDED)
            self._forget(reservation)
            raise
        except TandemError:  # NOTE: refused; there is nothing to settle
            self._forget(reservation)
            raise

    def settle(self, reservation: Reservation, usage: Usage, outcome: ChargeOutcome) -> asyncio.Event | None:
        """Bills the usage and releases the rest of the reservation.

        Returns an event that is set once the store has accepted it; None: it was settled before.
        """
        if reservation.is_settled:
            return None
        self._forget(reservation)
        charge = reservation.charge
        used = (int(outcome is not ChargeOutcome.REFUNDED), usage.num_rated_input, usage.num_output)
        is_granted = reservation.rate_limits is not None
        entry = self._entry(reservation, usage, outcome)
        return self.settlements.add(ChargeSettlement(entry, charge.key.limits.rates, charge.amounts, is_granted, used))

    async def settle_and_wait(self, reservation: Reservation, usage: Usage, outcome: ChargeOutcome) -> None:
        """Like `settle`; waits up to `SETTLE_WAIT_S` for the store, so that the next request sees the new balance."""
        has_it = self.settle(reservation, usage, outcome)
        if has_it is not None and not has_it.is_set():
            try:
                async with asyncio.timeout(SETTLE_WAIT_S):
                    await has_it.wait()
            except TimeoutError:
                pass

    async def refresh(self) -> None:
        """Reloads the cached keys, to notice revocations."""
        await self._keys.refresh()

    def _forget(self, reservation: Reservation) -> None:
        reservation.is_settled = True
        self._open.pop(reservation.charge.charge_id, None)

    async def _refresh(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_S)
            try:
                await self.refresh()
            except Exception:  # the edge of a task: without it, revoked keys would go on counting
                _logger.exception("keys could not be looked up again; that is tried every %g s", REFRESH_S)

    async def renew(self) -> None:
        """Renews the reservations of running requests, with checkpoints of their usage, and bills those of dead
        gateways.

        If another store process has taken over, recent settlements are resent to it.

        NOTE: also renews requests that the store may not have granted: it ignores unknown ones.
        """
        await self.store.renew([self._renewal(reservation) for reservation in self._open.values()])
        await self.store.expire()
        former, self._incarnation = self._incarnation, await self.store.incarnation()
        if former not in (None, "", self._incarnation) and (num_settlements := self.settlements.resend()):
            _logger.warning(
                "another process answers for the store of accounts: it is told the last %d settlements again",
                num_settlements,
            )
        self.settlements.forget_accepted(may_be_lost=self._incarnation != "")

    def _renewal(self, reservation: Reservation) -> Renewal:
        usage = reservation.delivered()
        checkpoint = None if usage == Usage() else self._entry(reservation, usage, ChargeOutcome.EXPIRED)
        return Renewal(reservation.charge, reservation.rate_limits is not None, checkpoint)

    def _entry(self, reservation: Reservation, usage: Usage, outcome: ChargeOutcome) -> LedgerEntry:
        charge, key = reservation.charge, reservation.charge.key
        return LedgerEntry(
            charge.charge_id,
            reservation.request_id,
            key.key_id,
            key.tenant,
            reservation.model,
            int(self._wall() * 1000),
            usage,
            self.prices.cost_nanos(usage),
            outcome.value,
        )

    async def _renew(self) -> None:
        is_away = False
        while True:
            try:
                await self.renew()
                is_away = False
            except AccountsUnavailableError as error:
                if not is_away:
                    _logger.warning("what runs cannot be kept set aside: %s", error)
                is_away = True
            except Exception:  # the edge of a task: without it, what runs would be given back and billed as expired
                _logger.exception("what runs could not be kept set aside; that is tried every %g s", self._renew_s)
            await asyncio.sleep(self._renew_s)
