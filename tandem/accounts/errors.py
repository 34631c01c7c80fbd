"""Errors that refuse a request before it is served: under `core.errors`' tree, one class a status.

InvalidRequestError
├── KeyRefusedError          no key, an unknown or a revoked one (401)
├── NotAllowedError          the key may not do this (403)
└── BudgetExhaustedError     the key's budget does not cover it (402)
CapacityError
└── LimitExceededError       too much for this minute, or too many at once (429)
UnavailableError
└── AccountsUnavailableError the store of accounts does not answer (503)
"""

from tandem.accounts.rate_limit_state import RateLimitState
from tandem.core.errors import CapacityError, InvalidRequestError, UnavailableError


class KeyRefusedError(InvalidRequestError):
    """The request has no key, or an unknown or revoked one; the message says which."""


class NotAllowedError(InvalidRequestError):
    """The key is valid but may not do this."""


class BudgetExhaustedError(InvalidRequestError):
    """The request could cost more than the key's remaining budget; waiting does not help."""

    def __init__(self, message: str, rate_limits: RateLimitState | None = None) -> None:
        super().__init__(message)
        self.rate_limits = rate_limits


class LimitExceededError(CapacityError):
    """A rate or the concurrency of the key is exhausted. `limit`: the name of that limit."""

    def __init__(
        self, message: str, retry_after_s: float, limit: str, rate_limits: RateLimitState | None = None
    ) -> None:
        super().__init__(message, retry_after_s)
        self.limit = limit
        self.rate_limits = rate_limits


class AccountsUnavailableError(UnavailableError):
    """The store did not answer in time, or is not being asked. `may_have_happened`: the call may have taken effect."""

    def __init__(self, message: str, retry_after_s: float | None = None, *, may_have_happened: bool = False) -> None:
        super().__init__(message, retry_after_s)
        self.may_have_happened = may_have_happened
