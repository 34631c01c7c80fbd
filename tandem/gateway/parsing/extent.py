"""Finds the end of a bracketed value while it arrives, from its strings and brackets alone.

Invariant: the result does not depend on how the text was split into pieces. The value itself is not validated.
"""

import json
import re
from typing import Protocol

_JSON_PLAIN = re.compile(r"[ \t\r\n\w:,+.-]*", re.ASCII)
_PYTHON_PLAIN = re.compile(r"[^\[\](){}\"']*")
_INSIDE = {'"': re.compile(r'[^"\\\x00-\x1f]*'), "'": re.compile(r"[^'\\\x00-\x1f]*")}
_CLOSING = {"{": "}", "[": "]", "(": ")"}


class Extent(Protocol):
    """Follows one bracketed value from its opening bracket to its end. `is_broken`: the text cannot be such a value."""

    is_closed: bool
    is_broken: bool

    def take(self, text: str, at: int) -> tuple[int, str]:
        """Consumes `text` from `at` on. Returns the end of the value's part, and the consumed text to pass on."""
        ...


class BracketExtent:
    """Follows a value by rules that JSON and Python share.

    Args:
        plain: text outside strings that is no bracket; any other text marks the value as broken.
        quotes: characters that begin strings.
    """

    def __init__(self, plain: re.Pattern[str], brackets: str, quotes: str) -> None:
        self._plain = plain
        self._brackets = brackets
        self._quotes = quotes
        self._awaited: list[str] = []
        self._quote: str | None = None
        self._is_escaped = False
        self.is_closed = False
        self.is_broken = False

    def take(self, text: str, at: int) -> tuple[int, str]:
        taken: list[str] = []
        while at < len(text) and not self.is_closed:
            step = self._in_string(text, at) if self._quote is not None else self._outside(text, at)
            if not step:
                self.is_broken = True
                break
            taken.append(self._passed_on(step))
            at += len(step)
        return at, "".join(taken)

    def _passed_on(self, step: str) -> str:
        """NOTE: models write raw line breaks into strings, which JSON does not allow; they are escaped."""
        return json.dumps(step)[1:-1] if self._quote is not None and step < " " else step

    def _in_string(self, text: str, at: int) -> str:
        assert self._quote is not None
        if self._is_escaped:
            self._is_escaped = False
            return text[at]
        found = _INSIDE[self._quote].match(text, at)
        if found is not None and found.group():
            return found.group()
        if text[at] == self._quote:
            self._quote = None
        self._is_escaped = text[at] == "\\"
        return text[at]

    def _outside(self, text: str, at: int) -> str:
        """The next step outside strings; empty where the value is broken."""
        found = self._plain.match(text, at)
        if self._awaited and found is not None and found.group():
            return found.group()
        character = text[at]
        if self._awaited and character in self._quotes:
            self._quote = character
        elif character in self._brackets:
            self._awaited.append(_CLOSING[character])
        elif self._awaited and character == self._awaited[-1]:
            self._awaited.pop()
            self.is_closed = not self._awaited
        else:
            return ""
        return character


def json_extent() -> Extent:
    """Extent of a JSON object or array."""
    return BracketExtent(_JSON_PLAIN, "{[", '"')


def python_extent() -> Extent:
    """Extent of a Python call's arguments, parentheses included."""
    return BracketExtent(_PYTHON_PLAIN, "{[(", "\"'")
