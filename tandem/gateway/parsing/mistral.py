"""Tool-call format of Mistral models: after a mark either a JSON list of calls, or a name, a mark and the arguments.

The parser's base class `ToolParser` emits all other text; `tool_format` describes the methods of the format. NOTE:
their templates accept only call ids of nine letters or digits.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from tandem.gateway.conversation import Tool
from tandem.gateway.parsing.call_ids import call_ids
from tandem.gateway.parsing.call_object import stream_value
from tandem.gateway.parsing.call_rules import Callee, CallRules, json_arguments, json_call
from tandem.gateway.parsing.lark import Lark, choice, literal, up_to_limit
from tandem.gateway.parsing.markers import Markers
from tandem.gateway.parsing.output import Overlong
from tandem.gateway.parsing.source import Malformed, Wait
from tandem.gateway.parsing.tool_parser import ToolCallEnding, ToolParser
from tandem.gateway.parts import AnswerParser

START, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_ID = re.compile(r"[a-zA-Z0-9]{9}")


class MistralParser(ToolParser):
    """Parses calls in both forms."""

    def _answer(self) -> Wait[None]:
        start = Markers(START)
        while self._output.has_room:
            if (yield from self._say_until(start)) is None:
                return
            yield from self._source.spaces()
            if (yield from self._source.peek()) == "[":
                self._source.take(1)
                yield from self._list(start)
            else:
                yield from self._named(start)

    def _list(self, start: Markers) -> Wait[None]:
        yield from self._source.spaces()
        is_call = True
        while (
            is_call
            and self._output.has_room
            and (yield from self._call(start, is_marked=True)) is ToolCallEnding.CLOSED
        ):
            self._source.record()
            yield from self._source.spaces()
            is_call = (yield from self._source.peek()) == ","
            if is_call:
                self._source.take(1)
                yield from self._source.spaces()
            elif (yield from self._source.peek()) == "]":
                self._source.take(1)
                self._source.recorded()
        self._output.say(self._source.recorded())

    def _named(self, start: Markers) -> Wait[None]:
        try:
            name, call_id = yield from self._head()
        except Malformed:
            self._output.say(self._source.recorded())
            return
        self._source.recorded()
        self._output.begin(name, call_id)
        try:
            yield from stream_value(self._source, self._output.argue)
        except Overlong:
            return
        except Malformed:
            yield from self._broken(start, is_complete=False)

    def _head(self) -> Wait[tuple[str, str | None]]:
        """The name and id of a call, up to its arguments. Raises Malformed."""
        name, call_id = (yield from self._source.word()), None
        if name not in self._tools:
            raise Malformed
        if (yield from self._source.begins(CALL_ID)):
            self._source.take(len(CALL_ID))
            call_id = yield from self._source.word()
        if (yield from self._source.peek()) == "[":
            yield from self._source.expect(ARGS)
        yield from self._source.spaces()
        if (yield from self._source.peek()) != "{":
            raise Malformed
        return name, call_id if call_id is not None and _ID.fullmatch(call_id) else None


@dataclass(frozen=True, slots=True)
class MistralFormat:
    """A `ToolFormat`: calls after `[TOOL_CALLS]`. `is_named`: newer form, without a list; `has_ids`: calls have ids."""

    name: str = "mistral"
    markers: tuple[str, ...] = (START, CALL_ID, ARGS)
    is_named: bool = False
    has_ids: bool = False

    def parser(self, tools: Sequence[Tool], ids: Iterator[str], used_ids: Collection[str] = ()) -> AnswerParser:
        return MistralParser(tools, ids, used_ids)

    def ids(self) -> Iterator[str]:
        return call_ids("", 9)

    def rules(self, callees: Sequence[Callee], *, is_parallel: bool, lark: Lark) -> CallRules:
        start = lark.mark(START)
        if self.is_named:
            call_id = f"{lark.mark(CALL_ID)} /[a-zA-Z0-9]{{9}}/ " if self.has_ids else ""
            calls = [f"{literal(callee.name)} {call_id}{lark.mark(ARGS)} args_{i}" for i, callee in enumerate(callees)]
            body = "call " + (up_to_limit(f"{start} call") if is_parallel else "")
        else:
            calls = [json_call(callee, "arguments", index) for index, callee in enumerate(callees)]
            body = '"[" call ' + (up_to_limit('", " call') if is_parallel else "") + ' "]"'
        return CallRules(openings=(START,), body=body, rules=choice("call", calls) + json_arguments(callees))
