"""Tool-call format of Llama 3.2 and 4: a Python list of calls with keyword arguments, alone or between marks.

The parser's base class `ToolParser` emits all other text; `tool_format` describes the methods of the format.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from tandem.gateway.conversation import Tool
from tandem.gateway.parsing.call_ids import call_ids
from tandem.gateway.parsing.call_rules import Callee, CallRules
from tandem.gateway.parsing.extent import python_extent
from tandem.gateway.parsing.keyword_rules import keyword_rules
from tandem.gateway.parsing.lark import Lark, choice, literal, up_to_limit
from tandem.gateway.parsing.literals import arguments_as_json
from tandem.gateway.parsing.markers import Markers
from tandem.gateway.parsing.output import Overlong
from tandem.gateway.parsing.source import Malformed, Wait
from tandem.gateway.parsing.tool_parser import ToolCallEnding, ToolParser
from tandem.gateway.parts import AnswerParser

START, END = "<|python_start|>", "<|python_end|>"
_NAME = re.compile(r"[\w.-]*")


class PythonicParser(ToolParser):
    """Parses calls. Arguments are emitted at a call's end. Without marks, only an answer that begins with a list has
    calls.
    """

    def _answer(self) -> Wait[None]:
        start, both = Markers(START), Markers(START, END)
        self._source.record()
        is_inside = yield from self._list()
        while self._output.has_room or is_inside:
            marker = yield from self._say_until(both if is_inside else start)
            if marker is None:
                return
            if marker == START and not self._output.has_room:
                self._output.say(self._source.recorded())
            elif marker == START:
                is_inside = yield from self._list()
            else:
                self._source.recorded()
                self._output.drop_spaces()
                is_inside = False

    def _list(self) -> Wait[bool]:
        """Reads a list; returns whether it had a call. Other text, the recorded one included, is emitted as text."""
        source = self._source
        yield from source.spaces()
        if (yield from source.peek()) != "[":
            self._output.say(source.recorded())
            return False
        source.take(1)
        num_before = self._output.num_calls
        while self._output.has_room and (yield from self._one()) is ToolCallEnding.CLOSED:
            source.record()
            yield from source.spaces()
            separator = yield from source.peek()
            if separator == "]":
                source.take(1)
                source.recorded()
            if separator != ",":
                break
            source.take(1)
        self._output.say(source.recorded())
        return self._output.num_calls > num_before

    def _one(self) -> Wait[ToolCallEnding]:
        source = self._source
        yield from source.spaces()
        name = yield from source.run(_NAME)
        if name not in self._tools or (yield from source.peek()) != "(":
            self._output.say(source.recorded())
            return ToolCallEnding.NONE
        source.recorded()
        self._output.begin(name)
        return (yield from self._arguments(self._tools[name]))

    def _arguments(self, tool: Tool) -> Wait[ToolCallEnding]:
        """Reads a call's arguments; those that cannot be parsed are emitted as they were written."""
        extent, taken = python_extent(), [""]
        while not extent.is_closed and not extent.is_broken and (yield from self._source.more()):
            taken.append(self._source.take_extent(extent))
        text = "".join(taken)
        is_closed = extent.is_closed
        try:
            self._output.argue(arguments_as_json(text, _properties(tool)) if is_closed else text)
            if extent.is_broken:
                yield from self._argue_until(None, "")
        except Overlong:
            return ToolCallEnding.BROKEN
        except Malformed:
            self._argue(text)
        return ToolCallEnding.CLOSED if is_closed else ToolCallEnding.BROKEN


def _properties(tool: Tool) -> Sequence[str]:
    properties = tool.parameters.get("properties")
    return list(properties) if isinstance(properties, dict) else ()


@dataclass(frozen=True, slots=True)
class PythonicFormat:
    """A `ToolFormat`: Python calls in a list."""

    name: str = "llama_pythonic"
    markers: tuple[str, ...] = (START, END)

    def parser(self, tools: Sequence[Tool], ids: Iterator[str], used_ids: Collection[str] = ()) -> AnswerParser:
        return PythonicParser(tools, ids, used_ids)

    def ids(self) -> Iterator[str]:
        return call_ids("call_", 24)

    def rules(self, callees: Sequence[Callee], *, is_parallel: bool, lark: Lark) -> CallRules:
        calls = [f'{literal(callee.name + "(")} args_{index} ")"' for index, callee in enumerate(callees)]
        more = up_to_limit('", " call') if is_parallel else ""
        arguments = "".join(keyword_rules(callee, f"args_{index}") for index, callee in enumerate(callees))
        return CallRules(
            openings=("", START),
            body=f'"[" call {more} "]"',
            rules=choice("call", calls) + arguments,
            first_character="[",
        )
