"""Error messages for refused charges, the same for every store. Pure."""

from tandem.accounts.charge import Charge
from tandem.accounts.errors import BudgetExhaustedError, KeyRefusedError, LimitExceededError
from tandem.accounts.money import format_nanos
from tandem.accounts.rate_limit_state import RateLimitState
from tandem.core.errors import TandemError

REVOKED, BUDGET, CONCURRENCY = "revoked", "budget", "concurrency"
REQUESTS = "requests"
RATES = (REQUESTS, "input_tokens", "output_tokens")
_BUSY_S = 1.0  # the end of running requests cannot be predicted


def revoked() -> KeyRefusedError:
    """The error for a request with a revoked key."""
    return KeyRefusedError("this API key was revoked; ask for another one")


def refusal(why: str, charge: Charge, wait_ms: float, left_nanos: int, rate_limits: RateLimitState) -> TandemError:
    """The error for a charge that could not be reserved.

    Args:
        why: the name of the exhausted limit, one of the constants above.
        wait_ms: until a rate has enough.
        left_nanos: of the budget.
    """
    limits = charge.key.limits
    if why == REVOKED:
        return revoked()
    if why == BUDGET:
        return BudgetExhaustedError(
            f"this request could cost {format_nanos(charge.cost_nanos)}, but {format_nanos(left_nanos)} of the key's "
            f"budget of {format_nanos(limits.budget_nanos or 0)} is left; lower max_tokens or shorten the prompt, or "
            "ask for a larger budget",
            rate_limits,
        )
    if why == CONCURRENCY:
        return LimitExceededError(
            f"this API key has {limits.concurrency} requests running, which is its limit; try again when one has ended",
            _BUSY_S,
            why,
            rate_limits,
        )
    index = RATES.index(why)
    wanted, limit = charge.amounts[index], limits.rates[index]
    words = why.replace("_", " ")
    needs = "" if why == REQUESTS else f", and this request needs {wanted}"
    return LimitExceededError(
        f"this API key has used up its {limit} {words} a minute{needs}; try again in {wait_ms / 1000:.1f} s",
        wait_ms / 1000,
        why,
        rate_limits,
    )
