"""Tool-call format of Llama 3: JSON objects of name and parameters, alone or after a mark; `; ` separates several.

The parser's base class `ToolParser` emits all other text; `tool_format` describes the methods of the format.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from tandem.gateway.conversation import Tool
from tandem.gateway.parsing.call_ids import call_ids
from tandem.gateway.parsing.call_rules import Callee, CallRules, json_arguments, json_call
from tandem.gateway.parsing.lark import Lark, choice, up_to_limit
from tandem.gateway.parsing.markers import Markers
from tandem.gateway.parsing.output import MAX_CALLS
from tandem.gateway.parsing.source import Wait
from tandem.gateway.parsing.tool_parser import ToolCallEnding, ToolParser
from tandem.gateway.parts import AnswerParser

TAG = "<|python_tag|>"
_BETWEEN = re.compile(r"[ \t\r\n;]*")


class LlamaJsonParser(ToolParser):
    """Parses calls. Without the mark, an answer has calls only if it begins with one."""

    def _answer(self) -> Wait[None]:
        tag = Markers(TAG)
        yield from self._calls(tag, is_marked=False)
        while self._output.has_room:
            if (yield from self._say_until(tag)) is None:
                return
            yield from self._source.spaces()
            yield from self._calls(tag, is_marked=True)

    def _calls(self, tag: Markers, *, is_marked: bool) -> Wait[None]:
        """Reads calls; other text is emitted as text. NOTE: with `is_marked`, the mark was recorded before."""
        if not is_marked:
            self._source.record()
            yield from self._source.spaces()
        while self._output.has_room and (yield from self._source.peek()) == "{":
            if (yield from self._call(tag, is_marked=is_marked)) is not ToolCallEnding.CLOSED:
                return
            is_marked = False
            self._source.record()
            yield from self._source.run(_BETWEEN)
        self._output.say(self._source.recorded())


@dataclass(frozen=True, slots=True)
class LlamaJsonFormat:
    """A `ToolFormat`: JSON calls with `parameters`. `is_parallel`: there may be several calls in an answer."""

    name: str = "llama3_json"
    markers: tuple[str, ...] = (TAG,)
    is_parallel: bool = True

    def parser(self, tools: Sequence[Tool], ids: Iterator[str], used_ids: Collection[str] = ()) -> AnswerParser:
        return LlamaJsonParser(tools, ids, used_ids, MAX_CALLS if self.is_parallel else 1)

    def ids(self) -> Iterator[str]:
        return call_ids("call_", 24)

    def rules(self, callees: Sequence[Callee], *, is_parallel: bool, lark: Lark) -> CallRules:
        calls = [json_call(callee, "parameters", index) for index, callee in enumerate(callees)]
        more = up_to_limit('"; " call') if is_parallel and self.is_parallel else ""
        return CallRules(
            openings=("", TAG),
            body=f"call {more}",
            rules=choice("call", calls) + json_arguments(callees),
            first_character="{",
        )
