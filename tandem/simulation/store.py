"""Store shared by the gateways, in one simulated server: keys, balances and the ledger, as in the Redis store.

A call goes over the network and may be lost before or after its execution. A failover promotes a replica that lacks the
last writes. `Balance` is production code; contract tests keep it equal to the Redis scripts.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from tandem.accounts.balance import Balance, Rates
from tandem.accounts.charge import Charge, ChargeOutcome, ChargeSettlement, LedgerEntry, Renewal, Total
from tandem.accounts.errors import AccountsUnavailableError
from tandem.accounts.key import AccountKey
from tandem.accounts.ledger_query import LedgerQuery
from tandem.accounts.rate_limit_state import RateLimitState
from tandem.accounts.refusals import revoked
from tandem.accounts.store import LEASE_S, Spending
from tandem.simulation.fabric import Fabric
from tandem.simulation.node import Node

TIMEOUT_S = 0.5
STORE = "store"
T = TypeVar("T")


class StoreServer:
    """The server. `lag_s` of a failover: how far its replica is behind.

    Args:
        lease_s: what is set aside and not renewed for so long has expired; its checkpoint is billed then.
    """

    def __init__(self, node: Node, keys: Sequence[AccountKey], lease_s: float = LEASE_S) -> None:
        self.node = node
        self.keys = {key.key_id: key for key in keys}
        self.lease_s = lease_s
        self.is_down = self.is_full = False
        self.clock_offset_s = 0.0
        self.ledger: dict[str, LedgerEntry] = {}
        self.balances: dict[str, Balance] = {}
        self.num_failovers = 0
        self._checkpoints: dict[str, LedgerEntry] = {}
        self._writes: list[tuple[float, int, Callable[[int], object]]] = []

    def now_ms(self) -> int:
        return int((self.node.now_s() + self.clock_offset_s) * 1000)

    def reserve(self, charge: Charge, now_ms: int) -> RateLimitState:
        key = self.keys.get(charge.key.key_id)
        if key is None or not key.is_live:
            raise revoked()
        if charge.charge_id in self.ledger:
            raise AccountsUnavailableError("this request was given up before the store of accounts heard of it", 1.0)
        balance = self._balance(charge.key.key_id, charge.key.limits.rates, now_ms)
        self._expire(charge.key.key_id, now_ms)
        return balance.reserve(charge, now_ms, self._lease_ms)

    def settle(self, settlement: ChargeSettlement, now_ms: int) -> None:
        entry = settlement.entry
        if not self._unbill(entry.charge_id):
            return
        self._checkpoints.pop(entry.charge_id, None)
        self._expire(entry.key_id, now_ms)
        self._balance(entry.key_id, settlement.rates, now_ms).settle(settlement, now_ms)
        self.ledger[entry.charge_id] = entry

    def renew(self, renewals: Sequence[Renewal], now_ms: int) -> None:
        for renewal in renewals:
            charge, checkpoint = renewal.charge, renewal.checkpoint
            balance = self._balance(charge.key.key_id, charge.key.limits.rates, now_ms)
            is_lost = not balance.has(charge.charge_id)
            may_hold = renewal.is_granted and is_lost and self._unbill(charge.charge_id)
            balance.renew(charge, now_ms, self._lease_ms, is_granted=may_hold)
            if checkpoint is not None and balance.has(charge.charge_id):
                self._checkpoints[charge.charge_id] = checkpoint
        self.expire(now_ms)

    def expire(self, now_ms: int) -> None:
        """Bill the checkpoints of what nobody renewed, and give back the rest."""
        for key_id in self.balances:
            self._expire(key_id, now_ms)

    def write(self, action: Callable[[int], T]) -> T:
        """Do something that a failover may undo, at the server's time in milliseconds. A full disk takes no writes."""
        if self.is_full:
            raise AccountsUnavailableError("the store of accounts has no room on its disk", 1.0)
        now_ms = self.now_ms()
        result = action(now_ms)
        self._writes.append((self.node.now_s(), now_ms, action))
        return result

    def fail_over(self, lag_s: float) -> None:
        """The replica takes over, without the writes of the last `lag_s`."""
        kept_until_s = self.node.now_s() - lag_s
        self.ledger, self.balances, self._checkpoints = {}, {}, {}
        self._writes = [write for write in self._writes if write[0] < kept_until_s]
        self.num_failovers += 1
        for _, now_ms, action in self._writes:
            action(now_ms)

    def _expire(self, key_id: str, now_ms: int) -> None:
        balance = self.balances.get(key_id)
        if balance is None:
            return
        balance.expire(now_ms)
        for charge_id, entry in list(self._checkpoints.items()):
            if entry.key_id == key_id and not balance.has(charge_id):
                del self._checkpoints[charge_id]
                self.ledger[charge_id] = entry
                balance.spent_nanos += entry.cost_nanos

    def _unbill(self, charge_id: str) -> bool:
        """Take the entry of an expired charge out again. False: it was settled."""
        entry = self.ledger.get(charge_id)
        if entry is None:
            return True
        if entry.outcome != ChargeOutcome.EXPIRED:
            return False
        del self.ledger[charge_id]
        self.balances[entry.key_id].spent_nanos -= entry.cost_nanos
        return True

    def _balance(self, key_id: str, rates: Rates, now_ms: int) -> Balance:
        balance = self.balances.get(key_id)
        if balance is None:
            balance = self.balances[key_id] = Balance(rates, 0, now_ms)
        return balance

    @property
    def _lease_ms(self) -> int:
        return round(self.lease_s * 1000)


class SimulatedStore:
    """`AccountStore` as one gateway sees it."""

    def __init__(self, fabric: Fabric, node: Node, server: StoreServer) -> None:
        self._fabric = fabric
        self._node = node
        self._server = server

    def start(self) -> None:
        """Nothing is open."""

    async def close(self) -> None:
        """Nothing is open."""

    async def add_key(self, key: AccountKey) -> None:
        self._server.keys[key.key_id] = key

    async def find_keys(self, key_ids: Sequence[str]) -> Mapping[str, AccountKey]:
        keys = self._server.keys
        return await self._call(lambda: {key_id: keys[key_id] for key_id in key_ids if key_id in keys})

    async def all_keys(self) -> Sequence[AccountKey]:
        return await self._call(lambda: list(self._server.keys.values()))

    async def revoke_key(self, key_id: str, now_s: int) -> bool:
        raise NotImplementedError("no key is revoked in a simulation")

    async def reserve(self, charge: Charge) -> RateLimitState:
        return await self._write(partial(self._server.reserve, charge))

    async def settle(self, settlement: ChargeSettlement) -> None:
        await self._write(partial(self._server.settle, settlement))

    async def renew(self, renewals: Sequence[Renewal]) -> None:
        if renewals:
            await self._write(partial(self._server.renew, list(renewals)))

    async def expire(self) -> None:
        await self._write(self._server.expire)

    async def incarnation(self) -> str:
        return await self._call(lambda: f"server {self._server.num_failovers}")

    async def spending(self, key_id: str) -> Spending:
        raise NotImplementedError("nobody asks in a simulation")

    async def entries(self, query: LedgerQuery) -> Sequence[LedgerEntry]:
        return await self._call(lambda: list(self._server.ledger.values()))

    async def totals(self, since_day: str | None = None, until_day: str | None = None) -> Sequence[Total]:
        raise NotImplementedError("nobody asks in a simulation")

    async def _write(self, action: Callable[[int], T]) -> T:
        return await self._call(lambda: self._server.write(action))

    async def _call(self, action: Callable[[], T]) -> T:
        """Send a call, execute it and return its result; request and response may be lost."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await self._way(self._node.name, STORE)
        except TimeoutError:
            raise AccountsUnavailableError("the store of accounts does not answer", 1.0) from None
        result = action()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await self._way(STORE, self._node.name)
        except TimeoutError:
            message = "the store of accounts does not answer"
            raise AccountsUnavailableError(message, 1.0, may_have_happened=True) from None
        return result

    async def _way(self, source: str, target: str) -> None:
        await asyncio.sleep(self._fabric.delay_s())
        if self._server.is_down or self._fabric.is_blocked(source, target):
            await asyncio.Event().wait()
