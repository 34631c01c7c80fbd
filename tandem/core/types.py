"""Value types shared between packages: finish reasons and token log-probabilities."""

from dataclasses import dataclass
from enum import StrEnum


class FinishReason(StrEnum):
    """Reason why a request ended."""

    STOP = "stop"  # end-of-sequence token, stop token or stop string
    LENGTH = "length"  # max_tokens or the context limit
    ABORT = "abort"  # cancelled by its caller
    ERROR = "error"  # the engine could not continue it
    CONTENT_FILTER = "content_filter"  # a moderator stopped it


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities at one position, before temperature and filters.

    Args:
        token_id, logprob: of the token that the position has.
        rank: its rank; 1 for the likeliest token.
        top: (token id, logprob) of the likeliest tokens, as many as were asked for, likeliest first.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()
