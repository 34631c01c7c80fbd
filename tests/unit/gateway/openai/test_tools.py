"""Tools, their choice and the answer's format are honoured whole or refused by the name of what cannot be."""

from typing import Any

import pytest

from tandem.gateway.conversation import FormatKind, OutputFormat
from tandem.gateway.errors import RequestError
from tandem.gateway.openai.tools import read_format, read_tools
from tandem.gateway.parsing.output_rules import output_grammar

NULL_OR = {"anyOf": [{"type": "null"}, {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}]}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FUNCTION = {"name": "f", "parameters": SCHEMA}
UNENFORCEABLE = {"enum": [2**64 - 1]}
TOOL = {"type": "function", "function": FUNCTION}


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, OutputFormat(FormatKind.JSON_OBJECT)),
        ({"type": "json_object", "schema": None, "json_schema": None}, OutputFormat(FormatKind.JSON_OBJECT)),
        ({"type": "json_object", "schema": SCHEMA}, OutputFormat(FormatKind.JSON_SCHEMA, SCHEMA)),
        ({"type": "json_object", "schema": NULL_OR}, OutputFormat(FormatKind.JSON_SCHEMA, NULL_OR)),
        (
            {"type": "json_object", "schema": {"properties": SCHEMA["properties"]}},
            OutputFormat(FormatKind.JSON_SCHEMA, SCHEMA),
        ),
        ({"type": "json_schema", "json_schema": {"schema": {}}}, OutputFormat(FormatKind.JSON_SCHEMA, {})),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "description": "", "schema": SCHEMA}},
            OutputFormat(FormatKind.JSON_SCHEMA, SCHEMA),
        ),
    ],
)
def test_formats(given: dict[str, Any], wanted: OutputFormat | None) -> None:
    assert read_format(given, None) == wanted


VLLM = {  # its own class, written out
    "json": None,
    "regex": None,
    "choice": None,
    "grammar": None,
    "json_object": None,
    "disable_any_whitespace": False,
    "disable_additional_properties": False,
    "whitespace_pattern": None,
    "structural_tag": None,
}


def test_structures_may_say_what_they_do_not_ask_for() -> None:
    assert read_format(None, VLLM | {"regex": "a+"}) == OutputFormat(FormatKind.REGEX, "a+")
    assert read_format(None, VLLM | {"json_object": True}) == OutputFormat(FormatKind.JSON_OBJECT, True)


@pytest.mark.parametrize(
    "given", [VLLM, {"json_object": False}, VLLM | {"regex": "a", "disable_any_whitespace": True}, {"x": 1}, []]
)
def test_one_structure_is_asked_for(given: Any) -> None:
    with pytest.raises(RequestError, match="exactly one of json, regex, choice, grammar, json_object"):
        read_format(None, given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"type": "yaml"}, "text, json_object, json_schema"),
        ({"type": ["text"]}, "text, json_object, json_schema"),
        ({"type": "text", "schema": SCHEMA}, "response_format.schema="),
        ({"type": "json_object", "schema": []}, "response_format.schema="),
        ({"type": "json_object", "json_schema": {"schema": SCHEMA}}, "response_format.json_schema="),
        ({"type": "json_schema", "schema": SCHEMA}, "response_format.schema="),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, "must have a schema"),
        ({"type": "json_schema", "json_schema": {"schema": SCHEMA, "x": 1}}, "response_format.json_schema.x=1"),
    ],
)
def test_a_format_that_is_not_understood_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError) as refusal:
        read_format(given, None)
    assert words in str(refusal.value)


@pytest.mark.parametrize("more", [{}, {"strict": None}, {"strict": False}, {"cache_control": {"type": "ephemeral"}}])
def test_a_tool_is_its_function(more: dict[str, Any]) -> None:
    (tool,), _ = read_tools([TOOL | more], None, None)
    assert (tool.name, tool.parameters, tool.strict) == ("f", SCHEMA, False)


@pytest.mark.parametrize(
    ("tool", "words"),
    [
        (TOOL | {"strict": True}, "tools[0].strict=True"),
        (TOOL | {"parameters": SCHEMA}, "tools[0].parameters="),
        ({"type": "function", "function": FUNCTION | {"x": 1}}, "tools[0].function.x=1"),
    ],
)
def test_a_member_in_the_wrong_place_is_refused(tool: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError) as refusal:
        read_tools([tool], None, None)
    assert words in str(refusal.value)


@pytest.mark.parametrize("kind", ["string", ["string", "null"], 5])
def test_arguments_that_are_no_object_are_refused(kind: Any) -> None:
    """Regression: a forced call of a tool whose parameters are a string answered nonsense with 200."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": kind}}}
    with pytest.raises(RequestError, match="must be 'object'") as refusal:
        read_tools([tool], "required", None)
    assert refusal.value.param == "tools[0]"


def test_arguments_that_may_be_an_object_are_taken() -> None:
    for schema in ({}, {"type": "object"}, {"type": ["object", "null"]}, {"properties": {"type": {"type": "string"}}}):
        read_tools([{"type": "function", "function": {"name": "f", "parameters": schema}}], "required", None)


@pytest.mark.parametrize(
    ("given", "where"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": UNENFORCEABLE}}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "json_object", "schema": UNENFORCEABLE}}, "response_format.schema"),
        ({"structured_outputs": {"json": UNENFORCEABLE}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": "a" * 9000}}, "structured_outputs.regex"),
    ],
)
def test_a_format_that_cannot_be_enforced_is_refused_by_its_field(given: dict[str, Any], where: str) -> None:
    output = read_format(given.get("response_format"), given.get("structured_outputs"))
    assert output is not None
    with pytest.raises(RequestError, match=f"^{where}: ") as caught:
        output_grammar(output)
    assert caught.value.param == where
