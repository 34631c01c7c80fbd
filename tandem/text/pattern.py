r"""Rewrites patterns of JSON schemas so that llguidance interprets them as they are meant.

NOTE: a character class that contains every control character, as `[^"]` does, lets llguidance (1.9.1) write any escape,
`\"` and `\\` among them. So NUL is removed from every class; an answer can then not contain it there.
"""

import re
from collections.abc import Iterator

_PARTS = re.compile(r"\\[pP](?:\{[^}]*\}|.)|\\.|\[|[^\\\[]+", re.DOTALL)
_IN_CLASS = re.compile(r"\\.|[\[\]]|[^\\\[\]]+", re.DOTALL)


def without_nul(pattern: str) -> str:
    """Removes NUL from the character classes of `pattern`. An invalid one stays invalid, for the compiler to report."""
    return "".join(_rewritten(pattern))


def _rewritten(pattern: str) -> Iterator[str]:
    at = 0
    while at < len(pattern):
        part = _PARTS.match(pattern, at)
        end = len(pattern) if part is None else _class_end(pattern, at) if part[0] == "[" else part.end()
        found = pattern[at:end]
        is_class = found[0] == "[" or found[:2] in ("\\p", "\\P")
        yield rf"[{found}&&[^\x00]]" if is_class else found
        at = end


def _class_end(pattern: str, begin: int) -> int:
    """Index after the class that begins at `begin`. NOTE: a `]` that comes first does not end it."""
    depth, at = 0, begin
    while at < len(pattern):
        part = _IN_CLASS.match(pattern, at)
        if part is None:
            break
        at = part.end()
        if part[0] == "[":
            depth += 1
            at += pattern[at : at + 1] == "^"
            at += pattern[at : at + 1] == "]"
        elif part[0] == "]":
            depth -= 1
            if not depth:
                return at
    return len(pattern)
