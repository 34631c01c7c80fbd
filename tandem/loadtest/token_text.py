"""Prompts as the JSON text of their token ids, generated from seeds without building lists of integers.

Equal seeds give equal tokens. NOTE: a client that spends milliseconds on a prompt would send the next one late.
"""

import random
from array import array
from collections import OrderedDict
from dataclasses import dataclass

_MAX_CACHED_TOKENS = 1 << 21


@dataclass(frozen=True, slots=True)
class Tokens:
    """Token ids as text, separated by commas."""

    text: bytes = b""
    count: int = 0

    def __add__(self, other: "Tokens") -> "Tokens":
        if not self.count or not other.count:
            return self if self.count else other
        return Tokens(self.text + b"," + other.text, self.count + other.count)


class TokenSource:
    """Generates tokens of one vocabulary. Blocks are cached, up to a bound, since traces repeat them.

    Args:
        first, last: range of token ids, both included.
    """

    def __init__(self, first: int, last: int, seed: int) -> None:
        self._words = [b"%d" % token_id for token_id in range(first, last + 1)]
        self._seed = seed
        self._kept: OrderedDict[tuple[str, int], Tokens] = OrderedDict()
        self._num_kept = 0

    def draw(self, name: str, count: int) -> Tokens:
        """`count` random tokens, always the same for this name."""
        if not count:
            return Tokens()
        size = len(self._words)
        numbers = array("I", random.Random(f"{self._seed}/{name}").randbytes(4 * count))
        return Tokens(b",".join([self._words[number % size] for number in numbers]), count)

    def block(self, name: str, count: int) -> Tokens:
        """Like `draw`, but cached."""
        key = name, count
        found = self._kept.get(key)
        if found is not None:
            self._kept.move_to_end(key)
            return found
        found = self._kept[key] = self.draw(name, count)
        self._num_kept += count
        while self._num_kept > _MAX_CACHED_TOKENS and len(self._kept) > 1:
            self._num_kept -= self._kept.popitem(last=False)[1].count
        return found
