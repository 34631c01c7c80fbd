"""What gateways share, in one simulated server: keys, balances and the ledger, as the Redis store keeps them.

A call takes its way over the network and may be lost before or after it was done. A failover promotes a replica that
lacks the last writes. `Balance` is production's own, whose behaviour the contract tests hold equal to the scripts'.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from tandem.accounts.balance import Balance, Rates
from tandem.accounts.charge import Charge, LedgerEntry, Settlement, Total
from tandem.accounts.errors import AccountsUnavailableError
from tandem.accounts.key import AccountKey
from tandem.accounts.ledger_query import LedgerQuery
from tandem.accounts.refusals import revoked
from tandem.accounts.standing import Standing
from tandem.accounts.store import LEASE_S, Spending
from tandem.core.errors import TandemError
from tandem.simulation.fabric import Fabric
from tandem.simulation.node import Node

TIMEOUT_S = 0.5
STORE = "store"
T = TypeVar("T")


class StoreServer:
    """The server. `lag_s`: how far its replica is behind. `settled_at_s` says when a charge was first acknowledged."""

    def __init__(self, node: Node, keys: Sequence[AccountKey]) -> None:
        self.node = node
        self.keys = {key.key_id: key for key in keys}
        self.is_down = False
        self.clock_offset_s = 0.0
        self.ledger: dict[str, LedgerEntry] = {}
        self.balances: dict[str, Balance] = {}
        self.lost_before_s = 0.0
        self.num_failovers = 0
        self._writes: list[tuple[float, Callable[[], object]]] = []

    def now_ms(self) -> int:
        return int((self.node.now_s() + self.clock_offset_s) * 1000)

    def reserve(self, charge: Charge) -> Standing:
        key = self.keys.get(charge.key.key_id)
        if key is None or not key.is_live:
            raise revoked()
        now_ms = self.now_ms()
        return self._balance(charge.key.key_id, charge.key.limits.rates, now_ms).reserve(
            charge, now_ms, round(LEASE_S * 1000)
        )

    def settle(self, settlement: Settlement) -> None:
        entry = settlement.entry
        if entry.charge_id in self.ledger:
            return
        now_ms = self.now_ms()
        self._balance(entry.key_id, settlement.rates, now_ms).settle(settlement, now_ms)
        self.ledger[entry.charge_id] = entry

    def renew(self, charges: Sequence[Charge]) -> None:
        now_ms = self.now_ms()
        for charge in charges:
            balance = self._balance(charge.key.key_id, charge.key.limits.rates, now_ms)
            balance.renew(charge.charge_id, now_ms, round(LEASE_S * 1000))

    def write(self, action: Callable[[], T]) -> T:
        """Do something that a failover may undo."""
        result = action()
        self._writes.append((self.node.now_s(), action))
        return result

    def fail_over(self, lag_s: float) -> None:
        """The replica takes over, without the writes of the last `lag_s`."""
        kept = [(at_s, action) for at_s, action in self._writes if at_s < self.node.now_s() - lag_s]
        self.ledger, self.balances, self._writes = {}, {}, kept
        self.lost_before_s = self.node.now_s()
        self.num_failovers += 1
        for _, action in kept:
            try:
                action()
            except TandemError:  # NOTE: what was granted then may be refused now
                continue

    def _balance(self, key_id: str, rates: Rates, now_ms: int) -> Balance:
        balance = self.balances.get(key_id)
        if balance is None:
            balance = self.balances[key_id] = Balance(rates, 0, now_ms)
        return balance


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

    async def reserve(self, charge: Charge) -> Standing:
        return await self._call(lambda: self._server.write(lambda: self._server.reserve(charge)))

    async def settle(self, settlement: Settlement) -> None:
        await self._call(lambda: self._server.write(lambda: self._server.settle(settlement)))

    async def renew(self, charges: Sequence[Charge]) -> None:
        charges = list(charges)
        await self._call(lambda: self._server.write(lambda: self._server.renew(charges)))

    async def spending(self, key_id: str) -> Spending:
        raise NotImplementedError("nobody asks in a simulation")

    async def entries(self, query: LedgerQuery) -> Sequence[LedgerEntry]:
        return await self._call(lambda: list(self._server.ledger.values()))

    async def totals(self, since_day: str | None = None, until_day: str | None = None) -> Sequence[Total]:
        raise NotImplementedError("nobody asks in a simulation")

    async def _call(self, action: Callable[[], T]) -> T:
        """There, done, and back, each a chance to be lost."""
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
