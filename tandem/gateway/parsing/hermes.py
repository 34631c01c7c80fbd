"""Tool-call format of Qwen and Hermes models: JSON objects of name and arguments, each between two marks.

The parser's base class `ToolParser` emits all other text; `tool_format` describes the methods of the format.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from tandem.gateway.conversation import Tool
from tandem.gateway.parsing.call_ids import call_ids
from tandem.gateway.parsing.call_rules import Callee, CallRules, json_arguments, json_call
from tandem.gateway.parsing.lark import Lark, choice, up_to_limit
from tandem.gateway.parsing.markers import Markers
from tandem.gateway.parsing.source import Wait
from tandem.gateway.parsing.tool_parser import ToolCallEnding, ToolParser
from tandem.gateway.parts import AnswerParser

START, END = "<tool_call>", "</tool_call>"


class HermesParser(ToolParser):
    """Parses calls; a missing closing brace or mark is tolerated."""

    def _answer(self) -> Wait[None]:
        outside, inside, end = Markers(START), Markers(START, END), Markers(END)
        is_inside = False
        while self._output.has_room or is_inside:
            marker = yield from self._say_until(inside if is_inside else outside)
            if marker is None:
                return
            if marker == END:
                self._source.recorded()
                self._output.drop_spaces()
                is_inside = False
            elif self._output.has_room:
                yield from self._source.spaces()
                is_inside = (yield from self._call(end, is_marked=True)) is not ToolCallEnding.NONE
            else:
                self._output.say(self._source.recorded())


@dataclass(frozen=True, slots=True)
class HermesFormat:
    """A `ToolFormat`: calls between `<tool_call>` and `</tool_call>`."""

    name: str = "hermes"
    markers: tuple[str, ...] = (START, END)

    def parser(self, tools: Sequence[Tool], ids: Iterator[str], used_ids: Collection[str] = ()) -> AnswerParser:
        return HermesParser(tools, ids, used_ids)

    def ids(self) -> Iterator[str]:
        return call_ids("call_", 24)

    def rules(self, callees: Sequence[Callee], *, is_parallel: bool, lark: Lark) -> CallRules:
        start, end = lark.mark(START), lark.mark(END)
        calls = [json_call(callee, "arguments", index) for index, callee in enumerate(callees)]
        more = up_to_limit(f'"\\n" {start} "\\n" call "\\n" {end}') if is_parallel else ""
        return CallRules(
            openings=(START,),
            body=f'"\\n" call "\\n" {end} {more}',
            rules=choice("call", calls) + json_arguments(callees),
        )
