"""Markers (marks): fixed texts such as `<tool_call>` in an answer, which may arrive in pieces. `source` finds them."""

import re


class Markers:
    """A set of marker texts, none of them empty. Immutable. `pattern` matches any of them."""

    def __init__(self, *texts: str) -> None:
        self._texts = texts
        self._firsts = frozenset(text[0] for text in texts)
        self._longest = max(map(len, texts))
        self.pattern = re.compile("|".join(map(re.escape, texts)))

    def held_back(self, text: str, at: int) -> int:
        """Number of characters at the end of `text`, from `at` on, that may be the beginning of a marker."""
        end = text[max(at, len(text) - self._longest + 1) :]
        if self._firsts.isdisjoint(end):
            return 0
        return next((num for num in range(len(end), 0, -1) if self._may_be(end[len(end) - num :])), 0)

    def _may_be(self, end: str) -> bool:
        return any(marker.startswith(end) for marker in self._texts)
