"""Interface of the account store, the state that gateways share: keys, the balances of their limits, and the ledger.

`accounts.Accounts` reserves a charge before a request, renews it with checkpoints (its usage so far), and settles it
afterwards. A reservation that is not renewed expires after a lease, and its last checkpoint is billed. Invariant:
spending is the sum of the ledger's costs, and a repeated settlement counts once while the store remembers it. Every
call raises AccountsUnavailableError when the store cannot be reached; it may still have taken effect.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from tandem.accounts.charge import Charge, ChargeSettlement, LedgerEntry, Renewal, Total
from tandem.accounts.key import AccountKey
from tandem.accounts.ledger_query import LedgerQuery
from tandem.accounts.rate_limit_state import RateLimitState

LEASE_S = 60.0  # after its last renewal, the reservation of a lost gateway expires and its checkpoint is billed
KEPT_DAYS = 400  # after which totals may be deleted


@dataclass(frozen=True, slots=True)
class Spending:
    """Spending of one key. `held_nanos`: reserved for running requests; `num_open`: number of these requests."""

    spent_nanos: int
    held_nanos: int
    num_open: int


class KeyStore(Protocol):
    """The part of the store with the keys."""

    async def add_key(self, key: AccountKey) -> None: ...

    async def find_keys(self, key_ids: Sequence[str]) -> Mapping[str, AccountKey]:
        """The keys that exist, including revoked ones."""
        ...

    async def all_keys(self) -> Sequence[AccountKey]:
        """All keys, oldest first."""
        ...

    async def revoke_key(self, key_id: str, now_s: int) -> bool:
        """Revokes a key: nothing is reserved for it any more. False: it does not exist."""
        ...


class ChargeStore(Protocol):
    """The part of the store that reserves and settles charges. `reserve` and `settle` are atomic; `renew` and `expire`
    concern many charges and may take effect for some of them.
    """

    async def reserve(self, charge: Charge) -> RateLimitState:
        """Reserves a charge and returns the key's rate limits after it.

        Raises:
            KeyRefusedError: the key was revoked.
            BudgetExhaustedError, LimitExceededError: a limit does not allow it; nothing was reserved.
        """
        ...

    async def settle(self, settlement: ChargeSettlement) -> None:
        """Adds the charge to the ledger and releases the unused reservation; no effect if repeated.

        Replaces an entry that was billed from a checkpoint meanwhile. Settlements are remembered for a day in Redis, in
        a file as long as the ledger keeps their entries.
        """
        ...

    async def renew(self, renewals: Sequence[Renewal]) -> None:
        """Renews leases of running charges. An expired one is reserved again, and its billed checkpoint undone."""
        ...

    async def expire(self) -> None:
        """Releases the reservations of expired charges and bills their checkpoints (`EmbeddedAccounts`: at its next
        `start`).
        """
        ...

    async def spending(self, key_id: str) -> Spending:
        """The key's spending so far."""
        ...

    async def incarnation(self) -> str:
        """Id of the store's process: if it changes, recently accepted calls may be lost. "": they never are."""
        ...


class Ledger(Protocol):
    """The part of the store with the usage."""

    async def entries(self, query: LedgerQuery) -> Sequence[LedgerEntry]:
        """Entries that match, oldest first."""
        ...

    async def totals(self, since_day: str | None = None, until_day: str | None = None) -> Sequence[Total]:
        """Totals by day, key and model; both days are inclusive."""
        ...


class AccountStore(KeyStore, ChargeStore, Ledger, Protocol):
    """A complete store. Call `start` in the event loop before anything else, and `close` once."""

    def start(self) -> None: ...

    async def close(self) -> None: ...
