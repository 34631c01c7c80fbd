"""Filter for ledger entries. Plain values; days are in UTC."""

from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta

from tandem.accounts.charge import LedgerEntry, Total
from tandem.core.errors import InvalidRequestError, shown

MAX_ENTRIES = 100_000  # that a ledger keeps; totals go on


@dataclass(frozen=True, slots=True)
class LedgerQuery:
    """Filter for ledger entries. None: no filter; both days are inclusive; at most the latest `limit` entries are
    returned.
    """

    since_day: str | None = None
    until_day: str | None = None
    key_id: str | None = None
    tenant: str | None = None
    limit: int = MAX_ENTRIES

    def __post_init__(self) -> None:
        _day_ms(self.since_day, "since_day", 0)
        _day_ms(self.until_day, "until_day", 1)

    @property
    def since_ms(self) -> int | None:
        """Start of the first day, milliseconds since the epoch."""
        return _day_ms(self.since_day, "since_day", 0)

    @property
    def until_ms(self) -> int | None:
        """End of the last day (exclusive), milliseconds since the epoch."""
        return _day_ms(self.until_day, "until_day", 1)

    def matches(self, entry: LedgerEntry) -> bool:
        return (
            (self.since_day or "") <= entry.day <= (self.until_day or "~")
            and self.key_id in (None, entry.key_id)
            and self.tenant in (None, entry.tenant)
        )

    def matches_total(self, total: Total) -> bool:
        return self.key_id in (None, total.key_id) and self.tenant in (None, total.tenant)


def _day_ms(day: str | None, name: str, num_days_after: int) -> int | None:
    if day is None:
        return None
    try:
        parsed = date.fromisoformat(day)
        if parsed.isoformat() != day:  # NOTE: days are compared as text
            raise ValueError("another form of ISO 8601")
        start = datetime(parsed.year, parsed.month, parsed.day, tzinfo=UTC) + timedelta(days=num_days_after)
    except (ValueError, OverflowError) as error:
        raise InvalidRequestError(
            f"{name}={shown(day)} must be a day before 9999-12-31, written as 2026-11-21"
        ) from error
    return int(start.timestamp() * 1000)
