"""The built-in moderator: words and phrases that may not pass, from a file. Looks at text alone, not at meaning."""

import re
from collections.abc import Iterable
from pathlib import Path

from tandem.core.errors import ConfigurationError
from tandem.gateway.moderation.base import Verdict

MAX_TERMS = 10_000
MAX_TERM_CHARACTERS = 200


class Blocklist:
    """Refuses texts with any of `terms`, as whole words in any case; one space stands for any white space.

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
        spelled = (re.escape(word).replace(r"\ ", r"\s{1,8}") for word in sorted(words, key=len, reverse=True))
        self._pattern = re.compile(rf"(?<!\w)(?:{'|'.join(spelled)})(?!\w)", re.IGNORECASE) if words else None

    @classmethod
    def load(cls, path: str) -> "Blocklist":
        """One term a line; empty lines and those that begin with # are left out."""
        try:
            lines = Path(path).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"the blocklist {path} cannot be read: {error}") from error
        return cls(line for line in lines if not line.lstrip().startswith("#"))

    async def judge(self, text: str, *, num_judged: int = 0, may_go_on: bool = False) -> Verdict:
        """NOTE: at the very end of a text that may go on, a word may be the beginning of another."""
        for found in () if self._pattern is None else self._pattern.finditer(text):
            if found.end() > num_judged and not (may_go_on and found.end() == len(text)):
                return Verdict("blocklist")
        return Verdict()

    async def close(self) -> None: ...
