"""Collects the parts that a parser finds in an answer (text and numbered tool calls), within limits on calls.

Invariant: white space beside a call is markup and dropped; all other text is emitted. A call that has begun is never
turned back into text.
"""

from collections.abc import Collection, Iterator, Sequence
from itertools import groupby

from tandem.gateway.parsing.source import Malformed
from tandem.gateway.parts import CallArguments, CallBegun, ContentText, Part

MAX_CALLS = 128  # in one answer
MAX_ARGUMENTS_CHARACTERS = 2**20  # of one call
_SPACES = " \t\r\n"


class Overlong(Malformed):
    """A call's arguments exceeded the limit; the call has ended."""


class AnswerOutput:
    """Collects the parts of one answer; holds white space that may be markup.

    Args:
        call_ids: ids of calls, in order.
        used_ids: ids that no call gets.
    """

    def __init__(self, call_ids: Iterator[str], max_calls: int = MAX_CALLS, used_ids: Collection[str] = ()) -> None:
        self._call_ids = call_ids
        self._used_ids = set(used_ids)
        self._max_calls = max_calls
        self._parts: list[Part] = []
        self._spaces: list[str] = []
        self._is_after_call = False
        self._num_argued = 0
        self.num_calls = 0

    @property
    def has_room(self) -> bool:
        return self.num_calls < self._max_calls

    def say(self, text: str) -> None:
        """Emits text; trailing white space is held until more follows."""
        body = text.rstrip(_SPACES)
        if body:
            self._parts.append(ContentText("".join((*self._spaces, body))))
            self._spaces.clear()
            self._is_after_call = False
        if len(body) < len(text):
            self._spaces.append(text[len(body) :])

    def drop_spaces(self) -> None:
        """Drops held white space, because a mark follows it."""
        self._spaces.clear()

    def begin(self, name: str, call_id: str | None = None) -> None:
        """Begins a call. NOTE: a model may write the id of another call, as it has seen it in the conversation."""
        assert self.has_room
        self._spaces.clear()
        if call_id is None or call_id in self._used_ids:
            call_id = next(self._call_ids)
        self._used_ids.add(call_id)
        self._parts.append(CallBegun(self.num_calls, call_id, name))
        self._is_after_call = True
        self._num_argued = 0
        self.num_calls += 1

    def argue(self, text: str) -> None:
        """Adds to the arguments of the last call. Raises Overlong after emitting the excess as text."""
        room = MAX_ARGUMENTS_CHARACTERS - self._num_argued
        self._num_argued += len(text)
        if room > 0 and text:
            self._parts.append(CallArguments(self.num_calls - 1, text[:room]))
        if len(text) > room:
            self.say(text[max(room, 0) :])
            raise Overlong

    def flush(self) -> None:
        """Emits held white space, because the answer has ended."""
        if self._spaces and not self._is_after_call:
            self._parts.append(ContentText("".join(self._spaces)))
        self._spaces.clear()

    def drain(self) -> Sequence[Part]:
        """Returns the new parts; neighbours of one kind are joined."""
        parts, self._parts = self._parts, []
        if len(parts) < 2:
            return parts
        return [joined for _, group in groupby(parts, _kind) for joined in _joined(list(group))]


def _kind(part: Part) -> tuple[type[Part], int]:
    return type(part), part.index if isinstance(part, CallArguments | CallBegun) else 0


def _joined(group: list[Part]) -> list[Part]:
    first = group[0]
    if len(group) == 1 or isinstance(first, CallBegun):
        return group
    text = "".join(part.text for part in group if not isinstance(part, CallBegun))
    return [CallArguments(first.index, text) if isinstance(first, CallArguments) else type(first)(text)]
