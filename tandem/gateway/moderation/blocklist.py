"""Built-in `Moderator` (`base`): refuses texts that contain words or phrases listed in a file."""

import asyncio
import functools
import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from pathlib import Path

from tandem.core.errors import ConfigurationError
from tandem.gateway.moderation.base import ModerationVerdict

MAX_TERMS = 10_000  # in one file
MAX_TERM_CHARACTERS = 200
MAX_SPACES = 8  # characters of white space that one space of a term matches
_LONG = 2000  # characters, which take a millisecond; longer texts are searched in a thread
_BEGINNING = re.compile(r"(?<!\w)\S")
_IN_WORD = re.compile(r"\w")
_SPACES = re.compile(r"\s{2,}")
_NUM_CODES = 0x20000  # Unicode's planes that have cases
_SAME_UPPER = {"\u1fd3": "\u0390", "\u1fe3": "\u03b0", "\ufb06": "\ufb05"}  # of several characters


class Blocklist:
    """Refuses texts that contain any of `terms` as whole words, in any case; one space matches any white space.

    Invariant: finds the same matches as a regular expression of all terms, longest first and ignoring case, at a cost
    that hardly grows with their number.

    Raises:
        ConfigurationError: naming the term that cannot be used.
    """

    window = 1

    def __init__(self, terms: Iterable[str]) -> None:
        words = sorted({" ".join(term.split()) for term in terms} - {""})
        if len(words) > MAX_TERMS:
            raise ConfigurationError(f"the blocklist has {len(words)} terms; at most {MAX_TERMS} are taken")
        for word in words:
            if len(word) > MAX_TERM_CHARACTERS:
                raise ConfigurationError(f"the blocklist's term {word[:50]!r}… is longer than {MAX_TERM_CHARACTERS}")
        # NOTE: a phrase may be written with wider spaces than the list has, up to twice its length.
        self.overlap = 2 * max(map(len, words), default=0) + 1
        self._folds = _folds()
        self._terms = sorted({word.translate(self._folds) for word in words})
        self._longest = max(map(len, words), default=0)
        self._shorter = _shorter(self._terms)

    @classmethod
    def load(cls, path: str) -> "Blocklist":
        """Reads a file of one term a line; empty lines and those that begin with # are skipped."""
        try:
            lines = Path(path).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"the blocklist {path} cannot be read: {error}") from error
        return cls(line for line in lines if not line.lstrip().startswith("#"))

    async def judge(self, text: str, *, num_judged: int = 0, may_go_on: bool = False) -> ModerationVerdict:
        """NOTE: a match at the very end of a text that may go on does not count yet: the word may be longer."""
        if len(text) > _LONG:
            is_found = await asyncio.to_thread(self._is_in, text, num_judged, may_go_on)
        else:
            is_found = self._is_in(text, num_judged, may_go_on)
        return ModerationVerdict("blocklist" if is_found else None)

    def _is_in(self, text: str, num_judged: int, may_go_on: bool) -> bool:
        plain = _narrowed(text)
        folded = plain.translate(self._folds)
        num_passed = len(_narrowed(text[:num_judged]))
        end = 0
        for beginning in _BEGINNING.finditer(plain):
            if beginning.start() < end:
                continue  # NOTE: in a term that may stand there
            end = self._end(plain, folded, beginning.start())
            if end > num_passed and not (may_go_on and end == len(plain)):
                return True
        return False

    def _end(self, plain: str, folded: str, start: int) -> int:
        """End of the longest term that begins at `start`; 0: none does.

        NOTE: every term that the text begins with is a prefix of the last term in alphabetical order not after the
        text.
        """
        ahead = folded[start : start + self._longest]
        index = bisect_right(self._terms, ahead) - 1
        while index >= 0:
            term = self._terms[index]
            end = start + len(term)
            if ahead.startswith(term) and not _IN_WORD.match(plain, end):
                return end
            index = self._shorter[index]
        return 0

    async def close(self) -> None: ...


def _narrowed(text: str) -> str:
    """The text with each run of white space as one space, or as two where it is too long for a term."""
    return _SPACES.sub(lambda found: " " if len(found[0]) <= MAX_SPACES else "  ", text)


def _shorter(terms: list[str]) -> list[int]:
    """For each of the sorted terms, the index of the longest other term that is its prefix; -1: none."""
    found: list[int] = []
    open_terms = [-1]
    for index, term in enumerate(terms):
        while open_terms[-1] >= 0 and not term.startswith(terms[open_terms[-1]]):
            open_terms.pop()
        found.append(open_terms[-1])
        open_terms.append(index)
    return found


@functools.cache
def _folds() -> Mapping[int, str]:
    """Table for `str.translate`: one character for all that `re.IGNORECASE` equates; a space for any white space."""
    return {code: folded for code in range(_NUM_CODES) if (folded := _folded(chr(code))) != chr(code)}


def _folded(char: str) -> str:
    if char.isspace():
        return " "
    lower = char.lower()[0]
    upper = lower.upper()
    return upper if len(upper) == 1 else _SAME_UPPER.get(lower, lower)
