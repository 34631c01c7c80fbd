"""Resumes known conversations of the Messages API (`known_conversations`): finds turns to resume at, and checks bodies.

A turn is a run of messages of one role; the known turn is the last one of a cache entry, from which the template
renders. A shortened body lacks the turns between its first one and the one before the known turn. Invariant: the
template sees them as if they had been parsed. A new question may hide the thinking before it, so each entry records
whether thinking is shown in the turns that later bodies lack.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tandem.gateway.anthropic.turns import Turn, TurnWriter
from tandem.gateway.known_conversations import KnownBeginning, KnownConversation, ResumePlaces
from tandem.gateway.message_spans import MessageSpans
from tandem.gateway.prompt_encoder import CannotResumeError
from tandem.gateway.resuming import OtherBeginningError

# Turns of a shortened body before the known one: the first turn, and the known one's predecessor.
_READ_BEFORE = 2


@dataclass(frozen=True, slots=True)
class SkippedTurns:
    """Properties of the turns that a shortened body lacks, as far as reading its other turns depends on them.

    Args:
        num_unread: number of their messages.
        num_thinking_turns: number of the body's latest turns whose thinking is shown again; None = all.
        is_question: whether the known turn is a question rather than the results of tool calls.
        has_thinking: whether a message before the known turn shows thinking.
    """

    num_unread: int
    num_thinking_turns: int | None
    is_question: bool
    has_thinking: bool

    @property
    def admits_question(self) -> bool:
        """Whether the messages before the known turn are rendered unchanged when another question follows it."""
        return self.num_thinking_turns is None or self.is_question or not self.has_thinking


@dataclass(frozen=True, slots=True)
class ResumableTurn:
    """The turn at which a later body may be resumed.

    Args:
        number: index of its first message in the conversation.
        places: where it and the turn before it begin in the parsed body.
        calls: tool names by id, of the calls before it that a later body lacks.
        skipped: properties of the turns that a later body lacks.
    """

    number: int
    places: ResumePlaces
    calls: Mapping[str, str]
    skipped: SkippedTurns

    def entry(
        self, spans: MessageSpans, known: KnownConversation | None, beginning: KnownBeginning
    ) -> KnownConversation:
        """Creates the cache entry. `spans`: offsets of parsed messages; `known`: entry this body was resumed from."""
        shown, left_out = (spans, 0) if known is None else (known.spans(spans), known.num_left_out)
        return KnownConversation.of(
            shown, self.places, self.calls, beginning, num_left_out=left_out, reader_state=self.skipped
        )


def check_resumed(turns: Sequence[Turn], num_thinking_turns: int | None, known: KnownConversation) -> SkippedTurns:
    """Checks that a shortened body may be resumed at its known turn; returns the properties of the turns that it
    lacks.

    Raises:
        CannotResumeError: the body has to be read as a whole, or from another known turn.
    """
    skipped = known.reader_state
    assert isinstance(skipped, SkippedTurns), "entries of one API are its own"
    if skipped.num_thinking_turns != num_thinking_turns:
        raise CannotResumeError("the thinking of other turns is shown than before")
    if len(turns) <= _READ_BEFORE or turns[_READ_BEFORE].num_messages > 1 or turns[0].num_messages > 1:
        raise CannotResumeError("the last known turn goes on")
    if not skipped.admits_question and any(turn.is_question for turn in turns[_READ_BEFORE + 1 :]):
        raise OtherBeginningError(
            "thinking before the last question is not shown any more",
            lambda other: _admits_question(other, num_thinking_turns),
        )
    return skipped


def find_resumable(
    turns: Sequence[Turn], writer: TurnWriter, num_thinking_turns: int | None, skipped: SkippedTurns | None
) -> ResumableTurn | None:
    """The last turn of the user at which a later body may be resumed. `skipped`: properties of the turns this body
    lacks.

    NOTE: turns with breakpoints are left out, as these move on with the conversation.
    """
    if num_thinking_turns not in (None, 0) or turns[0].role != "user" or turns[0].num_messages > 1:
        return None
    marked = [index for index, turn in enumerate(turns) if index and turn.is_marked]
    for index in range(min(marked, default=len(turns)) - 1, 1, -1):
        turn, before = turns[index], turns[index - 1]
        if turn.role != "user" or turn.num_messages > 1 or before.role != "assistant":
            continue
        number = writer.number_of(index)
        shown = [message for message in writer.messages[:number] if "reasoning_content" in message]
        has_thinking = bool(shown) or (skipped is not None and skipped.has_thinking)
        num_unread = writer.number_of(index - 1) - writer.number_of(0) - 1
        places = ResumePlaces(turn.number, before.number)
        return ResumableTurn(
            number,
            places,
            writer.names_before(index - 1),
            SkippedTurns(num_unread, num_thinking_turns, turn.is_question, has_thinking),
        )
    return None


def _admits_question(known: KnownConversation, num_thinking_turns: int | None) -> bool:
    skipped = known.reader_state
    if not isinstance(skipped, SkippedTurns):
        return False
    return skipped.num_thinking_turns == num_thinking_turns and skipped.admits_question
