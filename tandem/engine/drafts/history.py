"""Token history for drafters by text: a growing array, and a search for earlier places that match the array's end."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

TokenArray = npt.NDArray[np.int32]


class Match(NamedTuple):
    """Earlier places (indices) in a token array that are preceded by the same tokens as its end.

    Args:
        length: number of tokens that agree.
        places: indices of the tokens that follow, ascending.
    """

    length: int
    places: npt.NDArray[np.int64]


NO_MATCH = Match(0, np.empty(0, dtype=np.int64))


class TokenHistory:
    """Tokens of one request, or several sequences with -1 between them."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._buffer = np.array(token_ids, dtype=np.int32)
        self._length = len(token_ids)

    def __len__(self) -> int:
        return self._length

    @property
    def tokens(self) -> TokenArray:
        return self._buffer[: self._length]

    def extend(self, token_ids: Sequence[int]) -> None:
        end = self._length + len(token_ids)
        if end > len(self._buffer):
            grown = np.empty(max(64, 2 * end), dtype=np.int32)
            grown[: self._length] = self.tokens
            self._buffer = grown
        self._buffer[self._length : end] = token_ids
        self._length = end

    def keep_last(self, num_tokens: int) -> None:
        """Forget all but the last `num_tokens` tokens."""
        if self._length > num_tokens:
            self._buffer = self._buffer[self._length - num_tokens : self._length].copy()
            self._length = num_tokens


def longest_match(tokens: TokenArray, end: TokenArray, min_length: int, max_length: int) -> Match:
    """Places in `tokens` preceded by the longest possible end of `end`, of `min_length` to `max_length` tokens.

    `end` may be the end of `tokens` itself, which is no match of its own. One pass over the tokens, and one over the
    places left for each further token that agrees.
    """
    most = min(max_length, len(end))
    if most < min_length:
        return NO_MATCH
    places = np.flatnonzero(tokens[:-1] == end[-1]) + 1
    length = 1
    while len(places) and length < most:
        longer = places[places > length]
        longer = longer[tokens[longer - 1 - length] == end[-1 - length]]
        if not len(longer):
            break
        places, length = longer, length + 1
    return Match(length, places) if len(places) and length >= min_length else NO_MATCH


def continuation(tokens: TokenArray, place: int, num_tokens: int) -> list[int]:
    """The `num_tokens` tokens from `place` on; if the array ends earlier, the tokens from `place` to its end are
    repeated.
    """
    found: list[int] = tokens[place : place + num_tokens].tolist()
    period = len(found)
    while len(found) < num_tokens:
        found.append(found[-period])
    return found
