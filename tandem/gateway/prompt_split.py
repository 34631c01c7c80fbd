"""Splits a prompt's tokens for billing: read from the cache, written to it, or plain input. Pure; same in all dialects.

A pin is a prefix of a prompt that a worker has granted to keep cached for some time. Invariant: each token belongs to
exactly one class. Written tokens are those that a pin of this request keeps and no earlier pin kept, whether or not
their KV was already cached: the client pays for the guarantee to keep them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.core.pins import Pin
from tandem.gateway.cache_lifetimes import SHORT_S

MAX_PROMPT_TOKENS = 2**31  # more than any prompt has


@dataclass(frozen=True, slots=True)
class LivePins:
    """Number of a prompt's first tokens that unexpired earlier pins keep: any pins, and pins of over five minutes."""

    num_any: int = 0
    num_long: int = 0

    @classmethod
    def of_everything(cls) -> "LivePins":
        """Counts every prefix as pinned, so that nothing is billed as written when the pin book is unavailable."""
        return cls(MAX_PROMPT_TOKENS, MAX_PROMPT_TOKENS)


@dataclass(frozen=True, slots=True)
class PromptSplit:
    """Tokens of each billing class; the four fields add up to the prompt. `num_written_short`: for up to 5 minutes."""

    num_input: int
    num_read: int
    num_written_short: int
    num_written_long: int

    @property
    def num_written(self) -> int:
        return self.num_written_short + self.num_written_long


def split_prompt(num_prompt: int, num_cached: int, granted: Sequence[Pin], live: LivePins) -> PromptSplit:
    """Splits a prompt. `num_cached`: leading tokens whose KV was cached; `granted`: pins that its worker granted."""
    num_cached = min(num_cached, num_prompt)
    long_end = max((pin.num_tokens for pin in granted if pin.ttl_s > SHORT_S), default=0)
    short_end = max((pin.num_tokens for pin in granted if pin.ttl_s <= SHORT_S), default=0)
    long_start, short_start = live.num_long, max(live.num_any, long_end)
    written_long = max(0, long_end - long_start)
    written_short = max(0, short_end - short_start)
    read = num_cached - _overlap(num_cached, long_start, long_end) - _overlap(num_cached, short_start, short_end)
    return PromptSplit(num_prompt - read - written_long - written_short, read, written_short, written_long)


def _overlap(num_cached: int, start: int, end: int) -> int:
    """Tokens of [start, end) among the first `num_cached`."""
    return max(0, min(num_cached, end) - start)
