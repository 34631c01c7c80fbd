"""Groups Anthropic's messages into turns and translates these into the messages of a chat template.

A turn is a run of messages of one role. Invariant: every tool result answers a call of the turn before it, and every
call is answered in the turn after it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from types import MappingProxyType
from typing import Any

from tandem.core.errors import shown
from tandem.gateway.anthropic.blocks import (
    Block,
    CacheControl,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    join_texts,
    read_blocks,
)
from tandem.gateway.anthropic.breakpoints import BreakpointList
from tandem.gateway.conversation import UNREAD, Breakpoint
from tandem.gateway.errors import RequestError

ROLES = ("user", "assistant", "system")
OUR_IDS = "toolu_"  # what a call's own id begins with in this API


@dataclass(frozen=True, slots=True)
class Turn:
    """Consecutive messages of one role. `number`: index of the first one in the body."""

    role: str
    blocks: tuple[Block, ...]
    number: int
    num_messages: int = 1

    @property
    def texts(self) -> list[TextBlock]:
        return [block for block in self.blocks if isinstance(block, TextBlock)]

    @property
    def results(self) -> list[ToolResultBlock]:
        return [block for block in self.blocks if isinstance(block, ToolResultBlock)]

    @property
    def calls(self) -> list[ToolUseBlock]:
        return [block for block in self.blocks if isinstance(block, ToolUseBlock)]

    @property
    def is_question(self) -> bool:
        """Whether the turn is a new question of the user rather than the results of tool calls."""
        return self.role == "user" and not self.results

    @property
    def is_marked(self) -> bool:
        """Whether the turn has a cache breakpoint."""
        return any(getattr(block, "mark", None) or getattr(block, "marks", ()) for block in self.blocks)

    @property
    def thought(self) -> str:
        return "\n".join(block.text for block in self.blocks if isinstance(block, ThinkingBlock) and block.text)


def read_turns(messages: Sequence[Mapping[str, Any]]) -> list[Turn]:
    """Groups the messages into turns; system messages stay turns of their own.

    Raises:
        RequestError: naming the message, and the part of it, that is not supported.
    """
    read = [_turn(message, index) for index, message in enumerate(messages)]
    turns: list[Turn] = []
    for role, group in groupby(read, key=lambda turn: turn.role):
        same = list(group)
        if role == "system":
            turns += same
        else:
            blocks = tuple(block for turn in same for block in turn.blocks)
            turns.append(Turn(role, blocks, same[0].number, len(same)))
    return turns


class TurnWriter:
    """Writes turns as `messages` for a chat template, and adds their breakpoints to `points`.

    Args:
        names: tool names by call id, of the calls in turns that are not parsed.
    """

    def __init__(self, points: BreakpointList, names: Mapping[str, str] = MappingProxyType({})) -> None:
        self._points = points
        self._after_calls: list[CacheControl] = []  # whose place is where the next message begins
        self._names: dict[str, str] = dict(names)
        self._numbers: list[tuple[int, int]] = []
        self._open: dict[str, str] = {}  # calls without a result, and where they are
        self.messages: list[Mapping[str, Any]] = []

    def write(self, turns: Sequence[Turn], num_thinking_turns: int | None, num_unread: int = 0) -> None:
        """Writes all turns. Raises RequestError if calls and results do not match.

        Args:
            num_thinking_turns: number of latest turns whose thinking is shown again; None = all, 0 = only the turn
                still being answered.
            num_unread: messages after the first turn that are not read.
        """
        kept = _turns_with_thinking(turns, num_thinking_turns)
        for index, turn in enumerate(turns):
            if index == 1:
                self.messages += [UNREAD] * num_unread
            self._numbers.append((len(self.messages), len(self._names)))
            if turn.role == "user":
                self._write_user(turn)
            elif turn.role == "assistant":
                self._write_assistant(turn, is_thought_kept=index in kept)
            else:
                self.write_texts("system", turn.texts)
        self._close()

    @property
    def call_ids(self) -> frozenset[str]:
        """Ids of all calls, without this API's prefix."""
        return frozenset(map(_bare, self._names))

    def number_of(self, turn: int) -> int:
        """Index of the first message that was written for turn number `turn`."""
        return self._numbers[turn][0]

    def names_before(self, turn: int) -> dict[str, str]:
        """Tool names by call id, of the calls before turn number `turn`."""
        return dict(islice(self._names.items(), self._numbers[turn][1]))

    def write_texts(self, role: str, blocks: Sequence[TextBlock]) -> None:
        """Writes one message of text."""
        text, marks = join_texts(blocks)
        self._add({"role": role, "content": text}, marks)

    def _write_user(self, turn: Turn) -> None:
        has_text = False
        for block in turn.blocks:
            has_text |= isinstance(block, TextBlock)
            if isinstance(block, ToolResultBlock):
                if has_text:
                    raise _refusal(f"{block.where}: tool results come before the text of their message", block.where)
                self._write_result(block)
        if self._open:
            call_id, where = next(iter(self._open.items()))
            raise _refusal(f"{where}: the tool_use {shown(call_id)} has no tool_result in the message after it", where)
        if turn.texts or not turn.results:
            self.write_texts("user", turn.texts)

    def _write_result(self, block: ToolResultBlock) -> None:
        if self._open.pop(block.call_id, None) is None:
            raise _refusal(
                f"{block.where}.tool_use_id={shown(block.call_id)} must be the id of a tool_use in the message before "
                "it, and answer it once",
                block.where,
            )
        message = {"role": "tool", "tool_call_id": _bare(block.call_id), "name": self._names[block.call_id]}
        self._add({**message, "content": block.text}, block.marks)

    def _write_assistant(self, turn: Turn, *, is_thought_kept: bool) -> None:
        text, marks = join_texts(turn.texts)
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if is_thought_kept and turn.thought:
            message["reasoning_content"] = turn.thought
        if turn.calls:
            message["tool_calls"] = [self._call(block) for block in turn.calls]
        self._add(message, marks)
        self._after_calls = [block.mark for block in turn.calls if block.mark is not None]

    def _call(self, block: ToolUseBlock) -> dict[str, Any]:
        if block.call_id in self._names:
            raise _refusal(f"{block.where}.id={shown(block.call_id)} is the id of another tool_use too", block.where)
        self._names[block.call_id], self._open[block.call_id] = block.name, block.where
        function = {"name": block.name, "arguments": block.arguments}
        return {"id": _bare(block.call_id), "type": "function", "function": function}

    def _add(self, message: dict[str, Any], marks: Sequence[tuple[int, CacheControl]]) -> None:
        index = len(self.messages)
        self.messages.append(message)
        for mark in self._after_calls:
            self._points.add(Breakpoint(mark.ttl_s, message=index), mark.where)
        self._after_calls = []
        for offset, mark in marks:
            self._points.add(Breakpoint(mark.ttl_s, message=index, offset=offset), mark.where)

    def _close(self) -> None:
        if self._open:
            call_id, where = next(iter(self._open.items()))
            raise _refusal(f"{where}: the tool_use {shown(call_id)} has no tool_result after it", where)


def _turn(message: Mapping[str, Any], number: int) -> Turn:
    where = f"messages.{number}"
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise _refusal(f"{where}.role={shown(role)} must be one of {', '.join(ROLES)}", where)
    unknown = message.keys() - {"role", "content"}
    if unknown:
        raise _refusal(f"{where}.{shown(min(unknown))[1:-1]} is not supported by this server; leave it out", where)
    return Turn(role, read_blocks(message.get("content"), f"{where}.content", role), number)


def _turns_with_thinking(turns: Sequence[Turn], num_thinking_turns: int | None) -> set[int]:
    """Indexes of turns whose thinking is shown again. A user's question and all turns that answer it count as one."""
    answers: dict[int, list[int]] = {}
    question = 0
    for index, turn in enumerate(turns):
        question += turn.is_question
        if turn.role == "assistant":
            answers.setdefault(question, []).append(index)
    if num_thinking_turns == 0:
        return set(answers.get(question, ()))
    latest = sorted(answers)[-num_thinking_turns if num_thinking_turns is not None else 0 :]
    return {index for number in latest for index in answers[number]}


def _bare(call_id: str) -> str:
    """A call id without the prefix that this API adds."""
    return call_id.removeprefix(OUR_IDS)


def _refusal(message: str, where: str) -> RequestError:
    return RequestError(message, param=where)
