"""The unread text of an answer, for parsers that are generators: they yield wherever they have to wait for more text.

Invariant: the result does not depend on how the text was split into pieces; each character is copied a bounded number
of times. Readers never wait once the answer has ended.
"""

import json
import re
from collections.abc import Generator
from typing import TypeVar

from tandem.gateway.parsing.extent import Extent
from tandem.gateway.parsing.markers import Markers

_SPACES = re.compile(r"[ \t\r\n]*")
_SCALAR = re.compile(r"[\w+.-]*")
_WORD = re.compile(r"[\w.:/-]*")
_IN_STRING = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)

LONE_SURROGATE = re.compile("[\ud800-\udfff]")

T = TypeVar("T")
Wait = Generator[None, None, T]


class Malformed(Exception):  # noqa: N818 - it steers a parser and never leaves the package
    """The text is not what was expected, or the answer ended too early."""


class UnreadText:
    """The text that was not consumed yet. Methods that return `Wait` are generators and wait for more text."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._recorded: list[str] | None = None
        self.is_ended = False

    @property
    def is_over(self) -> bool:
        """Whether the answer has ended and all of it was consumed."""
        return self.is_ended and self._at == len(self._text)

    def add(self, text: str) -> None:
        self._text = self._text[self._at :] + text
        self._at = 0

    def end(self) -> None:
        self.is_ended = True

    def record(self) -> None:
        """Records the text that is consumed from here on."""
        self._recorded = []

    def recorded(self) -> str:
        """Returns the text consumed since `record` and stops recording; empty where nothing was recorded."""
        taken, self._recorded = "".join(self._recorded or ()), None
        return taken

    def take(self, num_characters: int) -> str:
        return self._take_to(self._at + num_characters)

    def take_all(self) -> str:
        return self._take_to(len(self._text))

    def take_before(self, markers: Markers | None) -> tuple[str, str | None]:
        """Consumes text that cannot be part of a marker; returns it, and the marker that follows, left unread."""
        if markers is None:
            return self.take_all(), None
        found = markers.pattern.search(self._text, self._at)
        if found is not None:
            return self._take_to(found.start()), found.group()
        num_held = 0 if self.is_ended else markers.held_back(self._text, self._at)
        return self._take_to(len(self._text) - num_held), None

    def take_extent(self, extent: Extent) -> str:
        """Consumes the text of a bracketed value that is available; returns it in the form to pass on."""
        end, text = extent.take(self._text, self._at)
        self._take_to(end)
        return text

    def _take_to(self, end: int) -> str:
        taken = self._text[self._at : end]
        if self._recorded is not None:
            self._recorded.append(taken)
        self._at = end
        return taken

    def more(self) -> Wait[bool]:
        """Waits until there is text; returns False at the end of the answer."""
        while self._at == len(self._text):
            if self.is_ended:
                return False
            yield
        return True

    def peek(self) -> Wait[str]:
        """The next character, left unread; empty at the end of the answer."""
        yield from self.more()
        return self._text[self._at : self._at + 1]

    def begins(self, text: str) -> Wait[bool]:
        """Whether `text` is next; it is left unread. Waits no longer than necessary."""
        while True:
            there = self._text[self._at : self._at + len(text)]
            if there == text or self.is_ended or not text.startswith(there):
                return there == text
            yield

    def run(self, pattern: re.Pattern[str]) -> Wait[str]:
        """Consumes the longest run that matches a pattern of single characters."""
        taken: list[str] = []
        while (yield from self.more()):
            found = pattern.match(self._text, self._at)
            taken.append(self._take_to(self._at if found is None else found.end()))
            if self._at < len(self._text):
                break
        return "".join(taken)

    def spaces(self) -> Wait[None]:
        """Consumes white space."""
        yield from self.run(_SPACES)

    def scalar(self) -> Wait[str]:
        """Consumes a number or a bare word such as `true` or `null`; may be empty."""
        return (yield from self.run(_SCALAR))

    def word(self) -> Wait[str]:
        """Consumes a run of characters that names and ids consist of; may be empty."""
        return (yield from self.run(_WORD))

    def expect(self, text: str) -> Wait[None]:
        """Consumes `text`. Raises Malformed where something else comes."""
        if not (yield from self.begins(text)):
            raise Malformed
        self.take(len(text))

    def string(self) -> Wait[str]:
        """Consumes a JSON string and returns its value. Raises Malformed where it is none, or does not end."""
        yield from self.expect('"')
        taken = [""]
        while (yield from self.more()):
            found = _IN_STRING.match(self._text, self._at)
            assert found is not None
            taken.append(self._take_to(found.end()))
            if (yield from self.peek()) == '"':
                self.take(1)
                return _decoded("".join(taken))
            yield from self._escape()
        raise Malformed

    def _escape(self) -> Wait[None]:
        """Waits for the character after a backslash, if one comes next. Raises Malformed where none follows."""
        while self._text[self._at : self._at + 2] == "\\":
            if self.is_ended:
                self.take_all()
                raise Malformed
            yield

    def value(self, extent: Extent) -> Wait[list[str]]:
        """Consumes a whole bracketed value and returns its pieces. Raises Malformed where it breaks off."""
        taken: list[str] = []
        while not extent.is_closed:
            if extent.is_broken or not (yield from self.more()):
                raise Malformed
            taken.append(self.take_extent(extent))
        return taken


def _decoded(inside: str) -> str:
    """NOTE: models write line breaks into strings as they are, which the decoder takes when it is not strict."""
    try:
        return str(json.loads(f'"{inside}"', strict=False))
    except ValueError as error:
        raise Malformed from error
