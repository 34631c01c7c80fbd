"""The balance of one key: token buckets of its rate limits, money, and the reservations of running requests.

Buckets refill continuously. Invariant: nothing is ever below zero; `held_nanos` is the sum of open reservations;
integers only, so nothing drifts. The scripts in `redis_scripts` follow the same rules. Times are arguments, in
milliseconds of one clock.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.accounts.charge import Amounts, Charge, ChargeSettlement
from tandem.accounts.rate_limit_state import PARTS_PER_TOKEN, RateLimitState
from tandem.accounts.refusals import BUDGET, CONCURRENCY, RATES, refusal

Rates = tuple[int | None, int | None, int | None]  # requests, input and output tokens per minute; None = no limit


@dataclass(slots=True)
class _OpenReservation:
    """A reservation that was neither settled nor has expired. `until_ms`: the end of its lease."""

    amounts: Amounts
    cost_nanos: int
    until_ms: int


class Balance:
    """Balance of one key. A new one has full buckets."""

    def __init__(self, rates: Rates, spent_nanos: int, now_ms: int) -> None:
        self._rates = rates
        self._levels = [(rate or 0) * PARTS_PER_TOKEN for rate in rates]
        self._at_ms = now_ms
        self._open: dict[str, _OpenReservation] = {}
        self._next_end_ms = 0
        self.spent_nanos = spent_nanos
        self.held_nanos = 0

    @property
    def num_open(self) -> int:
        """Number of open reservations."""
        return len(self._open)

    def has(self, charge_id: str) -> bool:
        """Whether this charge has an open reservation."""
        return charge_id in self._open

    def reserve(self, charge: Charge, now_ms: int, lease_ms: int) -> RateLimitState:
        """Makes a reservation. If a limit does not allow it, reserves nothing and raises as `ChargeStore.reserve`."""
        self._advance(now_ms)
        if why := self._missing(charge):
            raise refusal(
                why[0], charge, why[1], self._left_nanos(charge), RateLimitState.of(self._rates, self._levels)
            )
        for index in self._limited():
            self._levels[index] -= charge.amounts[index] * PARTS_PER_TOKEN
        self._hold(charge, now_ms + lease_ms)
        return RateLimitState.of(self._rates, self._levels)

    def settle(self, settlement: ChargeSettlement, now_ms: int) -> None:
        """Settles a charge; call once for each. A bucket that would be overdrawn stops at zero."""
        self._advance(now_ms)
        held = self._open.pop(settlement.entry.charge_id, None)
        reserved = (0, 0, 0)
        if held is not None:
            reserved = held.amounts
            self.held_nanos -= held.cost_nanos
        elif settlement.is_granted:
            reserved = settlement.reserved
        for index in self._limited():
            back = (reserved[index] - settlement.used[index]) * PARTS_PER_TOKEN
            self._levels[index] = max(0, min(self._full(index), self._levels[index] + back))
        self.spent_nanos += settlement.entry.cost_nanos

    def renew(self, charge: Charge, now_ms: int, lease_ms: int, *, is_granted: bool) -> None:
        """Extends the lease of a running charge; one that was granted but has expired is reserved again."""
        held = self._open.get(charge.charge_id)
        if held is not None:
            held.until_ms = now_ms + lease_ms
        elif is_granted:
            self._hold(charge, now_ms + lease_ms)

    def expire(self, now_ms: int) -> None:
        """Releases the money and concurrency of expired leases, but no rates: buckets refill within a minute anyway."""
        if now_ms < self._next_end_ms:
            return
        for charge_id in [charge_id for charge_id, held in self._open.items() if held.until_ms <= now_ms]:
            self.held_nanos -= self._open.pop(charge_id).cost_nanos
        self._next_end_ms = min((held.until_ms for held in self._open.values()), default=now_ms)

    def _hold(self, charge: Charge, until_ms: int) -> None:
        self.held_nanos += charge.cost_nanos
        self._open[charge.charge_id] = _OpenReservation(charge.amounts, charge.cost_nanos, until_ms)
        self._next_end_ms = min(self._next_end_ms, until_ms)

    def _advance(self, now_ms: int) -> None:
        passed_ms, self._at_ms = max(0, now_ms - self._at_ms), max(now_ms, self._at_ms)
        for index in self._limited():
            self._levels[index] = min(self._full(index), self._levels[index] + passed_ms * (self._rates[index] or 0))
        self.expire(now_ms)

    def _missing(self, charge: Charge) -> tuple[str, float] | None:
        """The first limit that does not allow the charge, and the milliseconds until it will."""
        limits = charge.key.limits
        if limits.budget_nanos is not None and charge.cost_nanos > self._left_nanos(charge):
            return BUDGET, 0.0
        if limits.concurrency is not None and len(self._open) >= limits.concurrency:
            return CONCURRENCY, 0.0
        for index in self._limited():
            missing = charge.amounts[index] * PARTS_PER_TOKEN - self._levels[index]
            if missing > 0:
                return RATES[index], missing / (self._rates[index] or 1)
        return None

    def _left_nanos(self, charge: Charge) -> int:
        return max(0, (charge.key.limits.budget_nanos or 0) - self.spent_nanos - self.held_nanos)

    def _limited(self) -> Sequence[int]:
        return [index for index, rate in enumerate(self._rates) if rate is not None]

    def _full(self, index: int) -> int:
        return (self._rates[index] or 0) * PARTS_PER_TOKEN
