"""Parts of an answer in every dialect: thinking, text and tool calls, in the order they come."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Thought:
    """More thinking."""

    text: str


@dataclass(frozen=True, slots=True)
class Said:
    """More text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A tool call begins. `index`: 0, 1, … within the answer. Its arguments follow."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments; all pieces together are one JSON object."""

    index: int
    text: str


Part = Thought | Said | CallBegun | CallArguments


@dataclass(slots=True)
class ToolCall:
    """A whole call. `arguments`: a JSON object as text."""

    call_id: str
    name: str
    arguments: str = ""


class AnswerParser(Protocol):
    """Takes one answer apart as it grows. What may still become something else is held back."""

    def feed(self, text: str) -> Sequence[Part]:
        """What is certain now."""
        ...

    def finish(self) -> Sequence[Part]:
        """What was held back, now that the answer has ended; what never became a call is text."""
        ...


class CallsOnlyParser:
    """Of an answer that can only be calls, as its grammar has it: text is a call that was cut, and dropped."""

    def __init__(self, inner: AnswerParser) -> None:
        self._inner = inner

    def feed(self, text: str) -> Sequence[Part]:
        return _without_text(self._inner.feed(text))

    def finish(self) -> Sequence[Part]:
        return _without_text(self._inner.finish())


def _without_text(parts: Sequence[Part]) -> Sequence[Part]:
    return [part for part in parts if not isinstance(part, Said)]


class PlainParser:
    """Everything is text."""

    def feed(self, text: str) -> Sequence[Part]:
        return (Said(text),) if text else ()

    def finish(self) -> Sequence[Part]:
        return ()
