"""Tokens by billing class. Plain values; a request counts once, however many workers served it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Usage:
    """Usage of one or more requests. The first four fields add up to the prompts.

    Args:
        num_input: prompt tokens neither read from a cache nor written to one.
        num_written_5m, num_written_1h: prompt tokens kept for up to five minutes, or longer.
        num_read: prompt tokens read from the cache.
    """

    num_input: int = 0
    num_written_5m: int = 0
    num_written_1h: int = 0
    num_read: int = 0
    num_output: int = 0

    @property
    def num_rated_input(self) -> int:
        """Tokens that count against the input rate limit: all prompt tokens except those read from the cache."""
        return self.num_input + self.num_written_5m + self.num_written_1h

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(
            self.num_input + other.num_input,
            self.num_written_5m + other.num_written_5m,
            self.num_written_1h + other.num_written_1h,
            self.num_read + other.num_read,
            self.num_output + other.num_output,
        )
