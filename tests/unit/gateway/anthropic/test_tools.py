"""Anthropic's tools, tool_choice and output formats, and which of them are refused."""

from typing import Any

import pytest

from tandem.gateway.anthropic.breakpoints import BreakpointList
from tandem.gateway.anthropic.fields import MessagesPromptBody
from tandem.gateway.anthropic.tools import read_format, read_tools
from tandem.gateway.conversation import FormatKind, OutputFormat, Tool, ToolChoice, ToolMode
from tandem.gateway.errors import RequestError

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"x": {"type": "integer"}}}


def deep(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"properties": value}
    return {"type": "object"} | value


def body(**more: Any) -> MessagesPromptBody:
    return MessagesPromptBody(model="m", messages=[], **more)


def tool(**more: Any) -> dict[str, Any]:
    return {"name": "f", "input_schema": SCHEMA, **more}


def read(tools: Any, choice: Any = None) -> tuple[tuple[Tool, ...], ToolChoice]:
    return read_tools(body(tools=tools, tool_choice=choice), BreakpointList())


def test_a_tool_is_its_name_description_and_schema() -> None:
    given = tool(type="custom", description="does f", strict=True, eager_input_streaming=True, defer_loading=False)
    (found,), choice = read([given | {"allowed_callers": ["direct"]}])
    assert found == Tool(name="f", description="does f", parameters=SCHEMA, strict=True)
    assert choice == ToolChoice()
    (shown,), _ = read([tool(input_examples=[{"x": 1}])])
    assert shown.parameters == SCHEMA | {"examples": [{"x": 1}]}


@pytest.mark.parametrize(
    ("choice", "mode", "names", "is_parallel"),
    [
        ({"type": "auto"}, ToolMode.AUTO, (), True),
        ({"type": "auto", "disable_parallel_tool_use": True}, ToolMode.AUTO, (), False),
        ({"type": "any", "disable_parallel_tool_use": False}, ToolMode.REQUIRED, (), True),
        ({"type": "tool", "name": "f"}, ToolMode.REQUIRED, ("f",), True),
        ({"type": "none"}, ToolMode.NONE, (), True),
    ],
)
def test_choices(choice: dict[str, Any], mode: ToolMode, names: tuple[str, ...], is_parallel: bool) -> None:
    assert read([tool()], choice)[1] == ToolChoice(mode, names, is_parallel)


@pytest.mark.parametrize(
    ("tools", "choice", "words"),
    [
        ([tool()] * 129, None, "129 entries; at most 128"),
        ([tool(), tool()], None, "the name of another tool"),
        ([tool(name="a b")], None, "name='a b'"),
        ([tool(name="a" * 129)], None, "1 to 128"),
        ([{"input_schema": SCHEMA}], None, "name"),
        ([{"name": "f"}], None, "tools.0.input_schema=None"),
        ([tool(input_schema={"type": "array"})], None, "tools.0.input_schema.type='array'"),
        ([tool(input_schema=deep(40))], None, "tools.0.input_schema is nested more than 32 deep"),
        ([tool(input_schema={"description": "x" * 300_000})], None, "tools.0.input_schema has 3000"),
        ([tool(description=5)], None, "tools.0.description=5"),
        ([tool(strict="yes")], None, "tools.0.strict='yes'"),
        ([tool(defer_loading=True)], None, "tools.0.defer_loading=True"),
        ([tool(allowed_callers=["code_execution_20260120"])], None, "tools.0.allowed_callers"),
        ([tool(input_examples="x")], None, "tools.0.input_examples='x'"),
        ([tool(colour="red")], None, "tools.0.colour='red'"),
        ([{"type": "web_search_20250305", "name": "web_search"}], None, "tools.0 is of type 'web_search_20250305'"),
        ([{"type": "bash_20250124", "name": "bash"}], None, "runs no tools of its own"),
        ([tool()], {"type": "all"}, "tool_choice.type='all'"),
        ([tool()], {"type": ["auto"]}, "tool_choice.type"),
        ([tool()], {"type": "tool", "name": "g"}, "'g', which is not among"),
        ([tool()], {"type": "tool"}, "tool_choice.name=None"),
        ([tool()], {"type": "auto", "name": "f"}, "tool_choice.name='f'"),
        ([tool()], {"type": "auto", "disable_parallel_tool_use": 1}, "disable_parallel_tool_use=1"),
        ([], {"type": "any"}, "no tools"),
    ],
)
def test_what_cannot_be_honoured_is_refused(tools: Any, choice: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        read(tools, choice)


def test_a_format_has_a_newer_and_an_older_name() -> None:
    given = {"type": "json_schema", "schema": SCHEMA}
    wanted = OutputFormat(FormatKind.JSON_SCHEMA, SCHEMA)
    assert read_format(body(output_config={"format": given, "effort": "low"})) == wanted
    assert read_format(body(output_format=given)) == wanted
    assert read_format(body(output_config={"format": None})) is None


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"output_config": {"format": {"type": "regex"}}}, "output_config.format="),
        ({"output_config": {"format": "json"}}, "output_config.format='json'"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema=None"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {}, "strict": True}}}, "format.strict=True"),
        ({"output_config": {"task_budget": {"total": 5}}}, "output_config.task_budget"),
        ({"output_format": {"type": "json_schema", "schema": deep(40)}}, "output_format.schema is nested"),
        ({"output_format": {}, "output_config": {"format": {}}}, "the older name"),
    ],
)
def test_formats_that_cannot_be_honoured_are_refused(more: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        read_format(body(**more))
