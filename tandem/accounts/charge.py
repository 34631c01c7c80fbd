"""Charges: the most a request may use, and its use. Plain values; `charge_id` is ours, so nobody can send one twice."""

from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from tandem.accounts.key import AccountKey
from tandem.accounts.usage import Usage
from tandem.core.known_fields import known_fields

Amounts = tuple[int, int, int]  # requests, input tokens, output tokens


class ChargeOutcome(StrEnum):
    """How a charged request ended. REFUNDED: nobody got anything of it. EXPIRED: its gateway was not heard of any more,
    and its last checkpoint is billed.
    """

    DONE = "done"
    ABORTED = "aborted"
    FAILED = "failed"
    REFUNDED = "refunded"
    EXPIRED = "expired"


@dataclass(frozen=True, slots=True)
class Charge:
    """What is set aside for a request. `amounts`: no more than a minute of each rate, so that it can ever be had."""

    charge_id: str
    key: AccountKey
    amounts: Amounts
    cost_nanos: int

    @classmethod
    def of(cls, charge_id: str, key: AccountKey, most: Usage, cost_nanos: int) -> "Charge":
        """NOTE: a request of more than a minute's worth takes a full bucket, as what it reads is not known yet."""
        wanted = (1, most.num_rated_input + most.num_read, most.num_output)
        requests, num_input, num_output = (
            amount if rate is None else min(amount, rate) for amount, rate in zip(wanted, key.limits.rates, strict=True)
        )
        return cls(charge_id, key, (requests, num_input, num_output), cost_nanos)


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """One request, for good. `at_ms`: when it ended, since the epoch."""

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
        """In UTC, as 2026-11-21."""
        return datetime.fromtimestamp(self.at_ms // 1000, UTC).strftime("%Y-%m-%d")

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "LedgerEntry":
        """Raises KeyError or TypeError where it is something else."""
        return cls(**{**known_fields(cls, value), "usage": Usage(**known_fields(Usage, value["usage"]))})


@dataclass(frozen=True, slots=True)
class ChargeSettlement:
    """What becomes of a charge.

    Args:
        limits: the three rates of the key.
        reserved: what was set aside.
        is_granted: the store said so; else it may or may not have been.
        used: what counts against the rates.
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
        """Raises KeyError or TypeError where it is something else."""
        rates, reserved, used = (tuple(value[name]) for name in ("rates", "reserved", "used"))
        return cls(LedgerEntry.from_json(value["entry"]), rates, reserved, bool(value["is_granted"]), used)


@dataclass(frozen=True, slots=True)
class Renewal:
    """A request that still runs.

    Args:
        is_granted: the store said so; then it is set aside again where that was lost.
        checkpoint: the entry that is billed if nothing more is heard of it; None: nothing was delivered yet.
    """

    charge: Charge
    is_granted: bool
    checkpoint: LedgerEntry | None = None


@dataclass(frozen=True, slots=True)
class Total:
    """All of a key's requests to a model on one day."""

    day: str
    key_id: str
    tenant: str
    model: str
    num_requests: int
    usage: Usage
    cost_nanos: int
