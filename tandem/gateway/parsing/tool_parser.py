"""Base class of the parsers of all model families: text until a marker, then a tool call.

Recovers from calls that break off. Invariant: parts do not depend on how the answer was split into pieces. Nothing
raises, whatever the model wrote; no text is lost except the marks around calls.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from enum import Enum

from tandem.gateway.conversation import Tool
from tandem.gateway.parsing.call_object import CallObject
from tandem.gateway.parsing.markers import Markers
from tandem.gateway.parsing.output import MAX_CALLS, AnswerOutput, Overlong
from tandem.gateway.parsing.source import Malformed, UnreadText, Wait
from tandem.gateway.parts import Part


class ToolCallEnding(Enum):
    """Result of reading a call."""

    CLOSED = "a call, whole"
    BROKEN = "a call that broke off"
    NONE = "no call: it is content"


class ToolParser(ABC):
    """An `AnswerParser`; each family's `_answer` finds its calls. `max_calls`: further calls are emitted as text."""

    def __init__(
        self,
        tools: Sequence[Tool],
        call_ids: Iterator[str],
        used_ids: Collection[str] = (),
        max_calls: int = MAX_CALLS,
    ) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self._source = UnreadText()
        self._output = AnswerOutput(call_ids, max_calls, used_ids)
        self._reading = self._whole()

    def feed(self, text: str) -> Sequence[Part]:
        if not text:
            return ()
        self._source.add(text)
        next(self._reading, None)
        return self._output.drain()

    def finish(self) -> Sequence[Part]:
        self._source.end()
        next(self._reading, None)
        self._output.flush()
        return self._output.drain()

    def _whole(self) -> Wait[None]:
        yield from self._answer()
        yield from self._say_until(None)

    @abstractmethod
    def _answer(self) -> Wait[None]:
        """Reads until no further call can come; the rest is text."""

    def _say_until(self, markers: Markers | None) -> Wait[str | None]:
        """Emits the text before the first marker; consumes, records and returns the marker. None at the end."""
        while True:
            text, marker = self._source.take_before(markers)
            self._output.say(text)
            if marker is not None:
                self._source.record()
                return self._source.take(len(marker))
            if self._source.is_ended:
                return None
            yield

    def _call(self, end: Markers | None, *, is_marked: bool) -> Wait[ToolCallEnding]:
        """Reads one call object. If it breaks off, all text up to `end` becomes its arguments."""
        call = CallObject(self._source, self._output, self._tools, is_marked=is_marked)
        try:
            yield from call.read()
        except Overlong:
            self._source.recorded()
        except Malformed:
            if not call.has_begun:
                self._output.say(self._source.recorded())
                return ToolCallEnding.NONE
            yield from self._broken(end, is_complete=call.is_complete)
        else:
            return ToolCallEnding.CLOSED
        return ToolCallEnding.BROKEN

    def _broken(self, end: Markers | None, *, is_complete: bool) -> Wait[None]:
        left = self._source.recorded()
        if is_complete:
            self._output.say(left)
        elif not self._source.is_over:
            yield from self._argue_until(end, left)

    def _argue_until(self, end: Markers | None, text: str) -> Wait[None]:
        """Emits `text` and everything before `end`, which is left unread, as arguments."""
        self._argue(text)
        while True:
            text, marker = self._source.take_before(end)
            self._argue(text)
            if marker is not None or self._source.is_ended:
                return
            yield

    def _argue(self, text: str) -> None:
        with suppress(Overlong):
            self._output.argue(text)
