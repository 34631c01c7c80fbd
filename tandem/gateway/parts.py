"""Parts of an answer, in every dialect: thinking, text and tool calls, in the order they arrive."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Thought:
    """A piece of thinking."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentText:
    """A piece of text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """Beginning of a tool call. `index`: 0, 1, … within the answer. Its arguments follow."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of a call's arguments; all pieces together are one JSON object."""

    index: int
    text: str


Part = Thought | ContentText | CallBegun | CallArguments


@dataclass(slots=True)
class ToolCall:
    """A complete call. `arguments`: a JSON object as text."""

    call_id: str
    name: str
    arguments: str = ""


WholePart = Thought | ContentText | ToolCall


def whole_parts(parts: Iterable[Part]) -> list[WholePart]:
    """Parts of an answer that has ended, in order: neighbouring texts as one, and calls with their arguments."""
    found: list[WholePart] = []
    call = ToolCall("", "")
    for group in (list(group) for _, group in groupby(parts, type)):
        for part in group:
            if isinstance(part, CallBegun):
                found.append(call := ToolCall(part.call_id, part.name))
        text = "".join(part.text for part in group if not isinstance(part, CallBegun))
        if isinstance(group[0], CallArguments):
            call.arguments += text
        elif text:
            found.append(Thought(text) if isinstance(group[0], Thought) else ContentText(text))
    return found


class AnswerParser(Protocol):
    """Splits one answer into parts while it grows. Text that may still become part of a call is held back."""

    def feed(self, text: str) -> Sequence[Part]:
        """Adds text and returns the parts that are certain now."""
        ...

    def finish(self) -> Sequence[Part]:
        """Ends the answer and returns the parts held back; an incomplete beginning of a call is text."""
        ...


class CallsOnlyParser:
    """Parser of an answer whose grammar admits only calls: text is an incomplete call, and dropped."""

    def __init__(self, inner: AnswerParser) -> None:
        self._inner = inner

    def feed(self, text: str) -> Sequence[Part]:
        return _without_text(self._inner.feed(text))

    def finish(self) -> Sequence[Part]:
        return _without_text(self._inner.finish())


def _without_text(parts: Sequence[Part]) -> Sequence[Part]:
    return [part for part in parts if not isinstance(part, ContentText)]


class PlainParser:
    """Parser of an answer without calls or thinking: everything is text."""

    def feed(self, text: str) -> Sequence[Part]:
        return (ContentText(text),) if text else ()

    def finish(self) -> Sequence[Part]:
        return ()
