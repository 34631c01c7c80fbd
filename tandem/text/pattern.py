r"""Rewrites patterns of JSON schemas so that llguidance interprets them as they are meant.

Classes have JavaScript's meaning, where `[` and `&&` are plain characters, and not Rust's. NOTE: a class that contains
every control character, as `[^"]` does, lets llguidance (1.9.1) write any escape, `\"` and `\\` among them. So NUL is
removed from every class; an answer can then not contain it there.
"""

import re
from collections.abc import Iterator

_PARTS = re.compile(r"\\[pP](?:\{[^}]*\}|.)|\\.|\[|[^\\\[]+", re.DOTALL)
# An element of a class. `set`: stands for several characters, so that it is neither end of a range.
_ELEMENT = re.compile(
    r"(?P<set>\[:\^?\w+:\]|\\[dDsSwW]|\\[pP](?:\{[^}]*\}|.))"
    r"|\\[xu]\{[^}]*\}|\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\.|[^\\]",
    re.DOTALL,
)
_MEANINGFUL = "[]&~-"  # to Rust, in a class


def without_nul(pattern: str) -> str:
    """Removes NUL from the character classes of `pattern`. An invalid one stays invalid, for the compiler to report."""
    return "".join(_rewritten(pattern))


def _rewritten(pattern: str) -> Iterator[str]:
    at = 0
    while at < len(pattern):
        part = _PARTS.match(pattern, at)
        if part is None:
            yield pattern[at:]
            return
        found, at = _class(pattern, at) if part[0] == "[" else (part[0], part.end())
        is_class = found[0] == "[" or found[:2] in ("\\p", "\\P")
        yield rf"[{found}&&[^\x00]]" if is_class else found


def _class(pattern: str, begin: int) -> tuple[str, int]:
    """The class that begins at `begin`, as Rust writes it, and the index after it. NOTE: a `]` that comes first does
    not end it.
    """
    at = begin + 1 + (pattern[begin + 1 : begin + 2] == "^")
    written = [pattern[begin:at]]
    while (element := _ELEMENT.match(pattern, at)) is not None:
        if element[0] == "]" and len(written) > 1:
            return "".join((*written, "]")), element.end()
        at = element.end()
        written.append(_plain(element))
        last = _ELEMENT.match(pattern, at + 1) if pattern[at : at + 1] == "-" else None
        if last is not None and last[0] != "]":
            at = last.end()
            written += [r"\-" if element["set"] or last["set"] else "-", _plain(last)]
    return pattern[begin:], len(pattern)


def _plain(element: re.Match[str]) -> str:
    return "\\" + element[0] if element[0] in _MEANINGFUL else element[0]
