"""Finds the first stop string in text that arrives in pieces.

Invariant: what is emitted, joined, is exactly the text before (or through) the match, or all of it, wherever the
pieces were cut; no more is held back than could still become part of a match.
"""

from collections.abc import Sequence
from typing import NamedTuple


class StopResult(NamedTuple):
    """Text that may be shown, and the stop string that was found; after it nothing more is emitted."""

    emit: str
    matched: str | None = None


class StopStrings:
    """Searches one request's text. The match that is completed first wins; of several, the one that began first.

    So a request stops at the first character where it can, and the answer does not depend on how the text was cut
    into tokens. The cost is linear in the text, once for each stop string.
    """

    def __init__(self, stops: Sequence[str], include_in_output: bool = False) -> None:
        self._matchers = [_Matcher(stop) for stop in dict.fromkeys(stops)]
        self._first_characters = {matcher.stop[:1] for matcher in self._matchers}
        self._include_in_output = include_in_output
        self._held = ""
        self._matched = False

    def add(self, text: str) -> StopResult:
        """Adds a piece of text and returns the text to show."""
        if self._matched:
            return StopResult("")
        if not self._held and self._first_characters.isdisjoint(text):
            return StopResult(text)
        for num_read, character in enumerate(text, start=1):
            complete = [matcher.stop for matcher in self._matchers if matcher.advance(character)]
            if complete:
                return self._match(self._held + text[:num_read], max(complete, key=len))
        return StopResult(self._release(text))

    def flush(self) -> str:
        """Returns the text held back, which cannot become a match: no text follows, or matching starts anew."""
        for matcher in self._matchers:
            matcher.reset()
        held, self._held = self._held, ""
        return held

    def _match(self, seen: str, stop: str) -> StopResult:
        self._matched = True
        self._held = ""
        return StopResult(seen if self._include_in_output else seen[: -len(stop)], stop)

    def _release(self, text: str) -> str:
        seen = self._held + text
        keep_from = len(seen) - max(matcher.num_matched for matcher in self._matchers)
        self._held = seen[keep_from:]
        return seen[:keep_from]


class _Matcher:
    """One stop string's automaton (Knuth, Morris, Pratt 1977): `num_matched` is how much of it the text ends with."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        self._borders = _borders(stop)

    def advance(self, character: str) -> bool:
        """Read one character; True where it completes the stop string."""
        while self.num_matched and self.stop[self.num_matched] != character:
            self.num_matched = self._borders[self.num_matched - 1]
        if self.stop[self.num_matched] == character:
            self.num_matched += 1
        return self.num_matched == len(self.stop)

    def reset(self) -> None:
        self.num_matched = 0


def _borders(stop: str) -> list[int]:
    """For each prefix of `stop`, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(stop)
    length = 0
    for position in range(1, len(stop)):
        while length and stop[position] != stop[length]:
            length = borders[length - 1]
        length += stop[position] == stop[length]
        borders[position] = length
    return borders
