"""Rate limits and refusals in each API's form: header names, durations and error types."""

import math
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from tandem.accounts.errors import (
    AccountsUnavailableError,
    BudgetExhaustedError,
    KeyRefusedError,
    LimitExceededError,
    NotAllowedError,
)
from tandem.accounts.rate_limit_state import RateLimitState, RateLimitWindow
from tandem.gateway.errors import MAX_RETRY_AFTER_S, Problem, problem_of

ACCOUNTS_AWAY = "this server's accounts are temporarily not available; try again"  # message to clients
_NEVER = {"x-should-retry": "false"}  # NOTE: or the SDKs ask again at once


def problem_for(error: BaseException) -> Problem:
    """The HTTP problem for an error, including the errors of accounts, which `errors.problem_of` does not know."""
    match error:
        case KeyRefusedError():
            return Problem(401, "invalid_request_error", "invalid_api_key", str(error))
        case NotAllowedError():
            return Problem(403, "permission_error", "not_allowed", str(error))
        case BudgetExhaustedError():
            return Problem(402, "insufficient_quota", "insufficient_quota", str(error))
        case LimitExceededError():
            kind = "requests" if error.limit in ("requests", "concurrency") else "tokens"
            wait_s = min(MAX_RETRY_AFTER_S, max(1, math.ceil(error.retry_after_s or 1.0)))
            return Problem(429, kind, "rate_limit_exceeded", str(error), None, wait_s)
        case AccountsUnavailableError():  # NOTE: its own words are for operators, and in the log
            return replace(problem_of(error), message=ACCOUNTS_AWAY)
    return problem_of(error)


def refusal_headers(error: BaseException, *, is_anthropic: bool, now: datetime | None = None) -> Mapping[str, str]:
    """Headers to send with a refusal, in addition to `Problem.headers`."""
    match error:
        case KeyRefusedError():
            return {"www-authenticate": "Bearer", **_NEVER}
        case NotAllowedError():
            return _NEVER
        case BudgetExhaustedError():
            return _NEVER | dict(limit_headers(error.rate_limits, is_anthropic=is_anthropic, now=now))
        case LimitExceededError():
            return limit_headers(error.rate_limits, is_anthropic=is_anthropic, now=now)
    return {}


def limit_headers(
    rate_limits: RateLimitState | None, *, is_anthropic: bool, now: datetime | None = None
) -> Mapping[str, str]:
    """Headers with the remaining rate limits of a key; limits that are not set are left out."""
    if rate_limits is None:
        return {}
    headers: dict[str, str] = {}
    windows = {"requests": rate_limits.requests, "tokens": rate_limits.tokens}
    if is_anthropic:
        now = now or datetime.now(UTC)
        windows |= {"input-tokens": rate_limits.input_tokens, "output-tokens": rate_limits.output_tokens}
        for name, window in windows.items():
            if window is not None:
                headers |= _anthropic(name, window, now)
    else:
        for name, window in windows.items():
            if window is not None:
                headers |= _openai(name, window)
    return headers


def _openai(name: str, window: RateLimitWindow) -> Mapping[str, str]:
    return {
        f"x-ratelimit-limit-{name}": str(window.limit),
        f"x-ratelimit-remaining-{name}": str(window.remaining),
        f"x-ratelimit-reset-{name}": duration(window.reset_s),
    }


def _anthropic(name: str, window: RateLimitWindow, now: datetime) -> Mapping[str, str]:
    # NOTE: whole seconds, rounded up, so that the limit is there when a client believes it
    reset = (now + timedelta(seconds=math.ceil(window.reset_s))).replace(microsecond=0)
    return {
        f"anthropic-ratelimit-{name}-limit": str(window.limit),
        f"anthropic-ratelimit-{name}-remaining": str(window.remaining),
        f"anthropic-ratelimit-{name}-reset": reset.isoformat().replace("+00:00", "Z"),
    }


def duration(seconds: float) -> str:
    """A duration in OpenAI's notation, rounded up to milliseconds: 20ms, 1s, 1.5s, 6m0s."""
    milliseconds = math.ceil(seconds * 1000)
    if 0 < milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    shown = f"{rest / 1000:g}s"
    return f"{minutes}m{shown}" if minutes else shown
