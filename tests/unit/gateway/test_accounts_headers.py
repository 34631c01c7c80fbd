"""Limits and refusals in each API's headers and words."""

from datetime import UTC, datetime

import pytest

from tandem.accounts.errors import BudgetExhaustedError, KeyRefusedError, LimitExceededError, NotAllowedError
from tandem.accounts.rate_limit_state import RateLimitState, RateLimitWindow
from tandem.core.errors import CapacityError
from tandem.gateway.accounts_headers import duration, limit_headers, problem_for, refusal_headers

STANDING = RateLimitState(
    RateLimitWindow(10, 4, 36.0), RateLimitWindow(1000, 900, 6.0004), RateLimitWindow(50, 0, 60.0)
)
NOW = datetime(2026, 11, 21, 12, 0, 0, 500_000, tzinfo=UTC)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (0.0201, "21ms"),
        (1, "1s"),
        (1.5, "1.5s"),
        (59.9, "59.9s"),
        (60, "1m0s"),
        (360, "6m0s"),
        (61.5, "1m1.5s"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_openai_has_the_tighter_of_the_two_token_rates() -> None:
    assert limit_headers(STANDING, is_anthropic=False) == {
        "x-ratelimit-limit-requests": "10",
        "x-ratelimit-remaining-requests": "4",
        "x-ratelimit-reset-requests": "36s",
        "x-ratelimit-limit-tokens": "50",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "1m0s",
    }


def test_anthropic_has_all_of_them_and_moments() -> None:
    headers = limit_headers(STANDING, is_anthropic=True, now=NOW)
    assert len(headers) == 12
    assert headers["anthropic-ratelimit-input-tokens-remaining"] == "900"
    assert headers["anthropic-ratelimit-input-tokens-reset"] == "2026-11-21T12:00:07Z"
    assert headers["anthropic-ratelimit-tokens-limit"] == "50"
    assert headers["anthropic-ratelimit-requests-reset"] == "2026-11-21T12:00:36Z"


@pytest.mark.parametrize("is_anthropic", [True, False])
def test_what_is_not_limited_is_not_mentioned(is_anthropic: bool) -> None:
    assert limit_headers(None, is_anthropic=is_anthropic) == {}
    assert limit_headers(RateLimitState(), is_anthropic=is_anthropic) == {}
    only = limit_headers(RateLimitState(input_tokens=RateLimitWindow(5, 5, 0.0)), is_anthropic=is_anthropic)
    assert not [name for name in only if "requests" in name or "output" in name]


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (KeyRefusedError("x"), 401, "invalid_request_error", "invalid_api_key"),
        (NotAllowedError("x"), 403, "permission_error", "not_allowed"),
        (BudgetExhaustedError("x"), 402, "insufficient_quota", "insufficient_quota"),
        (LimitExceededError("x", 3.2, "requests"), 429, "requests", "rate_limit_exceeded"),
        (LimitExceededError("x", 3.2, "concurrency"), 429, "requests", "rate_limit_exceeded"),
        (LimitExceededError("x", 3.2, "input_tokens"), 429, "tokens", "rate_limit_exceeded"),
        (CapacityError("x"), 429, "rate_limit_error", "capacity_exceeded"),
    ],
)
def test_each_refusal_has_its_status(error: Exception, status: int, kind: str, code: str) -> None:
    problem = problem_for(error)
    assert (problem.status, problem.error_type, problem.code) == (status, kind, code)


@pytest.mark.parametrize(("wait_s", "told"), [(0.0, 1), (0.1, 1), (3.2, 4), (60.0, 60), (500.0, 120)])
def test_clients_are_told_to_wait_as_long_as_it_takes_and_never_so_long_that_they_give_up(
    wait_s: float, told: int
) -> None:
    assert problem_for(LimitExceededError("x", wait_s, "requests")).headers == {"retry-after": str(told)}


def test_what_waiting_does_not_help_is_not_tried_again() -> None:
    for error in (KeyRefusedError("x"), NotAllowedError("x"), BudgetExhaustedError("x", STANDING)):
        assert refusal_headers(error, is_anthropic=False)["x-should-retry"] == "false"
    assert "x-should-retry" not in refusal_headers(LimitExceededError("x", 1, "requests"), is_anthropic=False)
    assert refusal_headers(ValueError(), is_anthropic=False) == {}
