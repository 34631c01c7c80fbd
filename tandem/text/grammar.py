"""Writes grammars that constrain answers, in llguidance's format: one text each, which travels with the request.

Invariant: a grammar expresses everything that was requested; parts that cannot be enforced are refused here by name, or
later by the compiler (`Grammars`).
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from llguidance import regex_to_lark

from tandem.core.errors import InvalidRequestError, shown
from tandem.text.grammars import GrammarMatcher, Grammars
from tandem.text.schema import check_size, enforceable

__all__ = [
    "GrammarMatcher",
    "Grammars",
    "choice_grammar",
    "enforceable",
    "json_object_grammar",
    "lark_grammar",
    "regex_grammar",
    "schema_grammar",
]

MAX_REGEX_CHARACTERS = 8192
MAX_LARK_CHARACTERS = 2**16
MAX_CHOICES = 4096
MAX_CHOICES_CHARACTERS = 2**18
# Texts, regexes, special tokens and comments as llguidance reads them, and outside of them what sets a temperature.
_LEXEMES = re.compile(
    r""""(?:\\.|[^"\\])*"?|//[^\n]*|/(?:\\.|[^/\\])+/?|#[^\n]*|<[^<>\s]+>|(?P<temperature>\btemperature[ \t]*=)""",
    re.DOTALL,
)


def schema_grammar(schema: Mapping[str, Any] | bool) -> str:
    """A grammar for JSON that matches a schema, with keys in the schema's order.

    Raises:
        InvalidRequestError: naming the place and the keyword that cannot be enforced, or the limit that is passed.
    """
    return json.dumps({"grammars": [{"json_schema": enforceable(schema)}]})


def json_object_grammar() -> str:
    """A grammar for any JSON object."""
    return schema_grammar({"type": "object"})


def regex_grammar(pattern: str) -> str:
    """A grammar for text that matches all of `pattern` (Rust's syntax: no look-around, no back-references).

    Raises:
        InvalidRequestError: it is not text, too long, or ends inside an escape.
    """
    _check_text("regex", pattern, MAX_REGEX_CHARACTERS)
    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:  # NOTE: `regex_to_lark` would leave it out
        raise InvalidRequestError(f"regex={shown(pattern)} ends with a backslash that escapes nothing")
    # NOTE: an empty one between slashes would begin a comment
    return _lark(f"start: /{regex_to_lark(pattern)}/\n" if pattern else 'start: ""')


def choice_grammar(choices: Sequence[str]) -> str:
    """A grammar for exactly one of several texts.

    Raises:
        InvalidRequestError: there are none or too many, or one is not text.
    """
    if not isinstance(choices, (list, tuple)) or not 1 <= len(choices) <= MAX_CHOICES:
        raise InvalidRequestError(f"choice={shown(choices)} must be a list of 1 to {MAX_CHOICES} texts")
    for choice in choices:
        _check_text("choice entry", choice, MAX_CHOICES_CHARACTERS)
    check_size("".join(choices), "choice", MAX_CHOICES_CHARACTERS)
    return _lark("start: " + " | ".join(map(_literal, dict.fromkeys(choices))))


def lark_grammar(source: str) -> str:
    """A grammar from Lark, in llguidance's variant of the syntax; it begins at the rule `start`.

    Raises:
        InvalidRequestError: it is not text, too long, or asks for what only the sampler could do.
    """
    _check_text("grammar", source, MAX_LARK_CHARACTERS)
    if any(found.lastgroup for found in _LEXEMES.finditer(source)):
        raise InvalidRequestError("the grammar sets a temperature for a rule, which cannot be honoured; remove it")
    return _lark(source)


def _lark(source: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": source}]})


def _literal(text: str) -> str:
    """A text as a quoted string of Lark. NOTE: llguidance reads DEL in one only where it is escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")


def _check_text(name: str, text: object, maximum: int) -> None:
    if not isinstance(text, str):
        raise InvalidRequestError(f"{name}={shown(text)} must be text")
    check_size(text, name, maximum)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"{name}={shown(text)} is not valid Unicode: {error}") from error
