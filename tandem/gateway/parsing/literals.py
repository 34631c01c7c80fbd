"""Translates the arguments of a Python call into a JSON object. Nothing is evaluated.

Values are Python's or JSON's: strings, numbers, True/true, None/null, lists, tuples, dicts. Raises only Malformed.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from tandem.gateway.parsing.source import LONE_SURROGATE, Malformed

MAX_DEPTH = 64
_SPACES = re.compile(r"\s*")
_NAME = re.compile(r"[^\W\d]\w*")
_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?(?![\w.])", re.ASCII)
_STRINGS = {
    '"': re.compile(r'"([^"\\]*(?:\\.[^"\\]*)*)"', re.DOTALL),
    "'": re.compile(r"'([^'\\]*(?:\\.[^'\\]*)*)'", re.DOTALL),
}
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|x([0-9a-fA-F]{2})|(.))", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""} | {c: c for c in "\\'\"/"}
_NAMED = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}


def arguments_as_json(text: str, positions: Sequence[str]) -> str:
    """Parses `text`, such as `(1, b=2)`. `positions`: names of arguments without a keyword.

    Raises:
        Malformed: it is not such a list of arguments.
    """
    arguments = _Reader(text).arguments(positions)
    try:
        readable = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise Malformed from error
    return json.dumps(arguments) if LONE_SURROGATE.search(readable) else readable


class _Reader:
    """Recursive-descent parser of the arguments' text."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def arguments(self, positions: Sequence[str]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        self._expect("(")
        while not self._takes(")"):
            name = self._keyword() or self._position(positions, len(found))
            if name in found:
                raise Malformed
            found[name] = self._value(0)
            if not self._takes(","):
                self._expect(")")
                break
        if self._at < len(self._text):
            raise Malformed
        return found

    def _keyword(self) -> str | None:
        """The name before an `=`, or None where the argument has no keyword."""
        self._skip_spaces()
        before, name = self._at, _NAME.match(self._text, self._at)
        if name is None:
            return None
        self._at = name.end()
        if self._takes("="):
            return name.group()
        self._at = before
        return None

    def _position(self, positions: Sequence[str], index: int) -> str:
        if index >= len(positions):
            raise Malformed
        return positions[index]

    def _value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise Malformed
        self._skip_spaces()
        match self._text[self._at : self._at + 1]:
            case '"' | "'":
                return self._string()
            case "[":
                return self._items("[", "]", depth)
            case "(":
                return self._items("(", ")", depth)
            case "{":
                return self._members(depth)
        return self._atom()

    def _items(self, opening: str, closing: str, depth: int) -> list[Any]:
        found: list[Any] = []
        self._expect(opening)
        while not self._takes(closing):
            found.append(self._value(depth + 1))
            if not self._takes(","):
                self._expect(closing)
                break
        return found

    def _members(self, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        self._expect("{")
        while not self._takes("}"):
            self._skip_spaces()
            key = self._string()
            self._expect(":")
            found[key] = self._value(depth + 1)
            if not self._takes(","):
                self._expect("}")
                break
        return found

    def _string(self) -> str:
        quoted = _STRINGS.get(self._text[self._at : self._at + 1])
        found = None if quoted is None else quoted.match(self._text, self._at)
        if found is None:
            raise Malformed
        self._at = found.end()
        return _unescaped(found.group(1))

    def _atom(self) -> Any:
        number = _NUMBER.match(self._text, self._at)
        if number is not None:
            self._at = number.end()
            return _number(number.group())
        name = _NAME.match(self._text, self._at)
        if name is None or name.group() not in _NAMED:
            raise Malformed
        self._at = name.end()
        return _NAMED[name.group()]

    def _skip_spaces(self) -> None:
        found = _SPACES.match(self._text, self._at)
        assert found is not None
        self._at = found.end()

    def _takes(self, character: str) -> bool:
        self._skip_spaces()
        if not self._text.startswith(character, self._at):
            return False
        self._at += 1
        return True

    def _expect(self, character: str) -> None:
        if not self._takes(character):
            raise Malformed


def _number(text: str) -> int | float:
    try:
        return float(text) if any(character in text for character in ".eE") else int(text)
    except ValueError as error:  # more digits than Python will read
        raise Malformed from error


def _unescaped(text: str) -> str:
    if "\\" not in text:
        return text
    return _paired(_ESCAPE.sub(_character, text))


def _character(found: re.Match[str]) -> str:
    code = next((group for group in found.groups()[:3] if group), None)
    if code is not None:
        number = int(code, 16)
        return chr(number) if number <= 0x10FFFF else found.group()
    return _ESCAPED.get(found.group(4), found.group())


def _paired(text: str) -> str:
    """Joins surrogate pairs: JSON writes characters above U+FFFF as two escapes."""
    if not LONE_SURROGATE.search(text):
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
