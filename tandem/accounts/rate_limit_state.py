"""Remaining limits of a key, as clients are told. Plain values."""

from collections.abc import Sequence
from dataclasses import dataclass

PARTS_PER_TOKEN = 60_000  # a bucket counts in these: one limit's worth of a millisecond is a whole number of them


@dataclass(frozen=True, slots=True)
class RateLimitWindow:
    """One rate. `reset_s`: until all of it is there again."""

    limit: int
    remaining: int
    reset_s: float


@dataclass(frozen=True, slots=True)
class RateLimitState:
    """After a request was reserved, or refused. None: that one is not limited."""

    requests: RateLimitWindow | None = None
    input_tokens: RateLimitWindow | None = None
    output_tokens: RateLimitWindow | None = None

    @property
    def tokens(self) -> RateLimitWindow | None:
        """Of the two token rates the one of which less is left."""
        found = [window for window in (self.input_tokens, self.output_tokens) if window is not None]
        return min(found, key=lambda window: window.remaining, default=None)

    @classmethod
    def of(cls, rates: Sequence[int | None], levels: Sequence[int]) -> "RateLimitState":
        """`levels`: what each bucket holds, in parts of a token; those of limits that are None do not matter."""
        return cls(*map(_window, rates, levels))


def _window(limit: int | None, level: int) -> RateLimitWindow | None:
    if limit is None:
        return None
    missing = limit * PARTS_PER_TOKEN - level
    return RateLimitWindow(limit, level // PARTS_PER_TOKEN, missing / limit / 1000)
