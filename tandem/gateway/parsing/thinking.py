"""Format of a model's thinking: its marks, the template variable that switches it, and the token budget of each effort.

NOTE: supports one pair of marks around thinking at the beginning of an answer. Channels, as some models write them, are
not supported.
"""

import re
import string
from collections.abc import Mapping
from dataclasses import dataclass

from tandem.core.errors import ConfigurationError, shown
from tandem.core.reasoning import MAX_MARKER_TOKENS, Reasoning
from tandem.gateway.conversation import Effort
from tandem.gateway.parsing.effort import BUDGETS
from tandem.gateway.parsing.trial import trial
from tandem.text.tokenizer import Tokenizer

KNOWN_MARKS: Mapping[str, tuple[str, str]] = {"think": ("<think>", "</think>"), "mistral": ("[THINK]", "[/THINK]")}
_AROUND = (*string.printable, "\n\n", ".\n", "é")  # texts beside a mark, to test whether its tokens stay the same
_VARIABLES = ("enable_thinking", "thinking")
_HINTS = re.compile(r"enable_thinking|reasoning_content")


@dataclass(frozen=True, slots=True)
class ThinkingFormat:
    """The marks and settings of thinking.

    Args:
        variable: template variable that switches thinking on or off; None = it cannot be switched.
        is_default: whether the model thinks when the variable is not set.
        budgets: thinking tokens by effort; None = any number.
        has_fixed_tokens: both marks are always the same tokens. Otherwise only the text shows where thinking ends.
    """

    start: str
    end: str
    variable: str | None
    is_default: bool
    budgets: Mapping[Effort, int | None]
    has_fixed_tokens: bool

    @classmethod
    def detect(
        cls,
        template: str | None,
        tokenizer: Tokenizer,
        parser: str = "auto",
        budgets: Mapping[Effort, int | None] = BUDGETS,
    ) -> "ThinkingFormat | None":
        """Detects the format; None = the model does not think. `parser`: auto, none, a known name, or `START,END`.

        Raises:
            ConfigurationError: it is none of these, or a mark is too long.
        """
        marks = _detected(template or "", tokenizer) if parser == "auto" else _named(parser)
        if marks is None:
            return None
        for mark in marks:
            _check_length(tokenizer, mark)
        has_fixed_tokens = all(_stands_alone(tokenizer, mark) for mark in marks)
        return cls(*marks, *_switch(template or ""), budgets, has_fixed_tokens)

    def is_open(self, prompt: str) -> bool:
        """Whether `prompt` ends with the opening mark. NOTE: a prompt with thinking after it does not count as open."""
        return bool(self.start) and prompt.rstrip().endswith(self.start)

    def reasoning(self, tokenizer: Tokenizer, *, is_open: bool, budget: int | None) -> Reasoning | None:
        """Rule that detects thinking among tokens; None if that is impossible. `budget`: maximum tokens; None = any."""
        if not self.has_fixed_tokens:
            return None
        start, end = _token_ids(tokenizer, self.start), _token_ids(tokenizer, self.end)
        return Reasoning(start, end, is_open=is_open, max_tokens=budget)


def _check_length(tokenizer: Tokenizer, mark: str) -> None:
    if len(_token_ids(tokenizer, mark)) > MAX_MARKER_TOKENS:
        raise ConfigurationError(
            f"the thinking mark {shown(mark)} is more than {MAX_MARKER_TOKENS} tokens; name a shorter one"
        )


def _token_ids(tokenizer: Tokenizer, mark: str) -> tuple[int, ...]:
    token_id = tokenizer.token_id(mark)
    return tuple(tokenizer.encode(mark, add_special_tokens=False)) if token_id is None else (token_id,)


def _stands_alone(tokenizer: Tokenizer, mark: str) -> bool:
    """Whether a mark is one token, or several that never merge with neighbours, as `>` and a line break often do."""
    if tokenizer.token_id(mark) is not None:
        return True
    ids = _token_ids(tokenizer, mark)
    for context in _AROUND:
        before, after = (tokenizer.encode(text, add_special_tokens=False) for text in (context + mark, mark + context))
        if tuple(before[-len(ids) :]) != ids or tuple(after[: len(ids)]) != ids:
            return False
    return True


def _detected(template: str, tokenizer: Tokenizer) -> tuple[str, str] | None:
    for start, end in KNOWN_MARKS.values():
        if start in template or end in template:
            return start, end
    if _HINTS.search(template):
        return next((marks for marks in KNOWN_MARKS.values() if tokenizer.token_id(marks[1]) is not None), None)
    return None


def _named(parser: str) -> tuple[str, str] | None:
    if parser == "none" or parser in KNOWN_MARKS:
        return KNOWN_MARKS.get(parser)
    start, comma, end = parser.partition(",")
    if not comma or not start.strip() or not end.strip() or start == end:
        known = ", ".join(("auto", "none", *KNOWN_MARKS))
        raise ConfigurationError(
            f"no reasoning parser is called {shown(parser)}; it may be {known}, or two different marks, `START,END`"
        )
    return start.strip(), end.strip()


def _switch(template: str) -> tuple[str | None, bool]:
    """The template variable that switches thinking, if any, and whether the model thinks without it."""
    for name in _VARIABLES:
        if not re.search(rf"\b{name}\b", template):
            continue
        default, on, off = (trial(template, variables=each) for each in ({}, {name: True}, {name: False}))
        if on != off:
            return name, default == on
    return None, True
