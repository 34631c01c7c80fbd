"""The seam of what all gateways of a deployment must agree on: keys, what is left of their limits, and the ledger.

Invariant: a charge is settled once however often it is told; what was spent is the sum of the ledger's costs; nothing
is set aside for longer than a lease without being renewed, and its last checkpoint is billed then. Every call raises
AccountsUnavailableError when the store is away; it may have happened all the same.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from tandem.accounts.charge import Charge, ChargeSettlement, LedgerEntry, Renewal, Total
from tandem.accounts.key import AccountKey
from tandem.accounts.ledger_query import LedgerQuery
from tandem.accounts.rate_limit_state import RateLimitState

LEASE_S = 60.0  # what a lost gateway set aside comes back after this, less its checkpoints
KEPT_DAYS = 400  # of totals


@dataclass(frozen=True, slots=True)
class Spending:
    """Of one key. `held_nanos`: set aside for requests that run; `num_open`: how many those are."""

    spent_nanos: int
    held_nanos: int
    num_open: int


class KeyStore(Protocol):
    """The keys."""

    async def add_key(self, key: AccountKey) -> None: ...

    async def find_keys(self, key_ids: Sequence[str]) -> Mapping[str, AccountKey]:
        """Those that exist, revoked ones among them."""
        ...

    async def all_keys(self) -> Sequence[AccountKey]:
        """Oldest first."""
        ...

    async def revoke_key(self, key_id: str, now_s: int) -> bool:
        """From now on nothing is reserved for it. False: there is no such key."""
        ...


class Till(Protocol):
    """Reserve and settle, each at once or not at all."""

    async def reserve(self, charge: Charge) -> RateLimitState:
        """Set it aside.

        Raises:
            KeyRefusedError: the key was revoked.
            BudgetExhaustedError, LimitExceededError: it is not there; nothing was taken.
        """
        ...

    async def settle(self, settlement: ChargeSettlement) -> None:
        """Put it into the ledger and give back what was not used; does nothing when it was done before. An entry of a
        checkpoint that was billed meanwhile is replaced.
        """
        ...

    async def renew(self, renewals: Sequence[Renewal]) -> None:
        """They still run. One that was taken for lost is set aside again, and its checkpoint is billed no longer."""
        ...

    async def expire(self) -> None:
        """Bill the checkpoints of what nobody renewed, and give back the rest."""
        ...

    async def spending(self, key_id: str) -> Spending: ...

    async def incarnation(self) -> str:
        """Of the process that answers: once it is another, what was acknowledged lately may be lost. "": never."""
        ...


class Ledger(Protocol):
    """What was used."""

    async def entries(self, query: LedgerQuery) -> Sequence[LedgerEntry]:
        """Oldest first."""
        ...

    async def totals(self, since_day: str | None = None, until_day: str | None = None) -> Sequence[Total]:
        """By day, key and model; both days included."""
        ...


class AccountStore(KeyStore, Till, Ledger, Protocol):
    """All three. `start` before anything else, in the event loop; `close` once."""

    def start(self) -> None: ...

    async def close(self) -> None: ...
