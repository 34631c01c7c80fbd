"""Result of an answer fed to a parser in pieces."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from tandem.gateway.conversation import Tool
from tandem.gateway.parsing.tool_formats import find_tool_format
from tandem.gateway.parts import AnswerParser, CallArguments, CallBegun, ContentText, Part, Thought

WEATHER = Tool(
    name="get_weather",
    parameters={"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
)
TOOLS = (WEATHER, Tool(name="f"), Tool(name="ns.get-it"))


@dataclass
class Reading:
    """`order`: kinds of parts as they came, repeats left out."""

    said: str = ""
    thought: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    order: list[str] = field(default_factory=list)

    def take(self, parts: Iterable[Part]) -> None:
        for part in parts:
            self._take(part)
            kind = type(part).__name__
            if self.order[-1:] != [kind]:
                self.order.append(kind)

    def _take(self, part: Part) -> None:
        match part:
            case ContentText():
                self.said += part.text
            case Thought():
                self.thought += part.text
            case CallBegun():
                assert part.index == len(self.calls)
                self.calls.append((part.name, ""))
            case CallArguments():
                name, arguments = self.calls[part.index]
                assert part.index == len(self.calls) - 1
                assert part.text
                self.calls[part.index] = (name, arguments + part.text)


def read(parser: AnswerParser, pieces: Iterable[str]) -> Reading:
    found = Reading()
    for piece in pieces:
        found.take(parser.feed(piece))
    found.take(parser.finish())
    return found


def ids() -> Iterator[str]:
    return (f"id{number}" for number in itertools.count())


def parser_of(name: str, tools: Sequence[Tool] = TOOLS) -> AnswerParser:
    form = find_tool_format(None, name)
    assert form is not None
    return form.parser(tools, ids())


def read_every_way(name: str, text: str, tools: Sequence[Tool] = TOOLS) -> Reading:
    """At once, and a character at a time, which must agree."""
    whole = read(parser_of(name, tools), [text])
    assert read(parser_of(name, tools), list(text)) == whole
    return whole
