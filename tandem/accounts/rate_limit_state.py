"""Remaining rate limits of a key, as reported to clients. Plain values."""

from collections.abc import Sequence
from dataclasses import dataclass

# Units of a bucket's level; a limit per minute refills a whole number of them in a millisecond.
PARTS_PER_TOKEN = 60_000


@dataclass(frozen=True, slots=True)
class RateLimitWindow:
    """State of one rate limit. `reset_s`: seconds until it is completely refilled."""

    limit: int
    remaining: int
    reset_s: float


@dataclass(frozen=True, slots=True)
class RateLimitState:
    """Rate limits after a request was reserved or refused; None: not limited."""

    requests: RateLimitWindow | None = None
    input_tokens: RateLimitWindow | None = None
    output_tokens: RateLimitWindow | None = None

    @property
    def tokens(self) -> RateLimitWindow | None:
        """The token limit (input or output) with fewer tokens remaining."""
        found = [window for window in (self.input_tokens, self.output_tokens) if window is not None]
        return min(found, key=lambda window: window.remaining, default=None)

    @classmethod
    def of(cls, rates: Sequence[int | None], levels: Sequence[int]) -> "RateLimitState":
        """Computes the state. `levels`: contents of the buckets, in 1/`PARTS_PER_TOKEN` of a token."""
        return cls(*map(_window, rates, levels))


def _window(limit: int | None, level: int) -> RateLimitWindow | None:
    if limit is None:
        return None
    missing = limit * PARTS_PER_TOKEN - level
    return RateLimitWindow(limit, level // PARTS_PER_TOKEN, missing / limit / 1000)
