"""Values of billing: a charge (the most a request may use), its settlement (its actual use), and the ledger's entries.

Charge ids are random ids of ours, so none is reused.
"""

from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from tandem.accounts.key import AccountKey
from tandem.accounts.usage import Usage
from tandem.core.known_fields import known_fields

Amounts = tuple[int, int, int]  # requests, input tokens, output tokens


class ChargeOutcome(StrEnum):
    """Outcome of a charged request. REFUNDED: nothing was delivered.

    EXPIRED: its gateway stopped renewing the lease, and its last checkpoint is billed.
    """

    DONE = "done"
    ABORTED = "aborted"
    FAILED = "failed"
    REFUNDED = "refunded"
    EXPIRED = "expired"


@dataclass(frozen=True, slots=True)
class Charge:
    """The most that a request may use, to be reserved. `amounts`: at most one minute's rate each; `cost_nanos`: in
    billionths of a unit of currency.
    """

    charge_id: str
    key: AccountKey
    amounts: Amounts
    cost_nanos: int

    @classmethod
    def of(cls, charge_id: str, key: AccountKey, most: Usage, cost_nanos: int) -> "Charge":
        """Creates a charge for the most that a request may use.

        NOTE: a request of more than a minute's rate takes a full bucket. Cached tokens count, as they are not known
        yet.
        """
        wanted = (1, most.num_rated_input + most.num_read, most.num_output)
        requests, num_input, num_output = (
            amount if rate is None else min(amount, rate) for amount, rate in zip(wanted, key.limits.rates, strict=True)
        )
        return cls(charge_id, key, (requests, num_input, num_output), cost_nanos)


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """The permanent record of one request. `at_ms`: when it ended, milliseconds since the epoch."""

    charge_id: str
    request_id: str
    key_id: str
    tenant: str
    model: str
    at_ms: int
    usage: Usage
    cost_nanos: int
    outcome: str

    @property
    def day(self) -> str:
        """The UTC day, such as 2026-11-21."""
        return datetime.fromtimestamp(self.at_ms // 1000, UTC).strftime("%Y-%m-%d")

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "LedgerEntry":
        """Inverse of `as_json`. Raises KeyError or TypeError for anything else."""
        return cls(**{**known_fields(cls, value), "usage": Usage(**known_fields(Usage, value["usage"]))})


@dataclass(frozen=True, slots=True)
class ChargeSettlement:
    """The end of a charge: what is billed, and what was reserved for it.

    Args:
        rates: the three rate limits of the key.
        reserved: amounts that were reserved.
        is_granted: the store confirmed the reservation; otherwise it may or may not exist.
        used: amounts that count against the rates.
    """

    entry: LedgerEntry
    rates: tuple[int | None, int | None, int | None]
    reserved: Amounts
    is_granted: bool
    used: Amounts

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "ChargeSettlement":
        """Inverse of `as_json`. Raises KeyError or TypeError for anything else."""
        rates, reserved, used = (tuple(value[name]) for name in ("rates", "reserved", "used"))
        return cls(LedgerEntry.from_json(value["entry"]), rates, reserved, bool(value["is_granted"]), used)


@dataclass(frozen=True, slots=True)
class Renewal:
    """Renewal of a running request's lease, which bounds how long its reservation lasts without its gateway.

    Args:
        is_granted: the store confirmed the reservation; it is made again if it was lost.
        checkpoint: the entry billed if the gateway dies; None: nothing was delivered yet.
    """

    charge: Charge
    is_granted: bool
    checkpoint: LedgerEntry | None = None


@dataclass(frozen=True, slots=True)
class Total:
    """Sum of a key's requests to a model on one day."""

    day: str
    key_id: str
    tenant: str
    model: str
    num_requests: int
    usage: Usage
    cost_nanos: int
