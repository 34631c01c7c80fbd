"""Hermes calls: whole, truncated, malformed, unknown."""

import json

import pytest

from tandem.gateway.parsing.hermes import HermesFormat
from tandem.gateway.parts import CallArguments, CallBegun, ContentText
from tests.unit.gateway.parsing.reading import TOOLS, ids, parser_of, read, read_every_way

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "東京", "days": 2}}\n</tool_call>'
ARGUMENTS = '{"city": "東京", "days": 2}'


def test_text_then_calls() -> None:
    found = read_every_way("hermes", f"I'll look.\n{CALL}\n{CALL}\n")
    assert found.said == "I'll look."
    assert found.calls == [("get_weather", ARGUMENTS)] * 2
    assert found.order == ["ContentText", "CallBegun", "CallArguments", "CallBegun", "CallArguments"]


def test_a_call_streams_as_it_comes() -> None:
    parser = HermesFormat().parser(TOOLS, ids())
    assert parser.feed("Hi") == [ContentText("Hi")]
    assert parser.feed(" <tool") == []
    assert parser.feed('_call>{"name": "f') == []
    assert parser.feed('"') == [CallBegun(0, "id0", "f")]
    assert parser.feed(', "arguments": {"a') == [CallArguments(0, '{"a')]
    assert parser.feed('": 1}') == [CallArguments(0, '": 1}')]
    assert parser.feed("}</tool_call> ") == []
    assert parser.feed("so") == [ContentText(" so")]
    assert parser.finish() == []


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ('{"name": "f", "arguments": {}}', "{}"),
        ('{"name": "f"}', "{}"),
        ('{"name":"f","arguments":null}', "{}"),
        ('{"arguments": {"a": [1, {"b": "}"}]}, "name": "f"}', '{"a": [1, {"b": "}"}]}'),
        ('{"name": "f", "parameters": {"a": 1}, "id": "x", "n": [1], "t": true}', '{"a": 1}'),
        ('{"id": 7, "name": "f", "arguments": {"a": 1}}', '{"a": 1}'),
        ('{"name": "\\u0066", "arguments": {"q": "\\"{\\\\"}}', '{"q": "\\"{\\\\"}'),
        ('{"name": "f", "arguments": {"x": "</tool_call>"}}', '{"x": "</tool_call>"}'),
        ('{"name": "f", "arguments": "{\\"a\\": \\"b\\"}"}', '{"a": "b"}'),
        ('{"name": "f", "arguments": "{\\"a\\": \\"\\ud800\\"}"}', '{"a": "\\ud800"}'),
        ('{"name": "f", "arguments": {"x": "a\nb\tc"}}', '{"x": "a\\nb\\tc"}'),
        ('{"name": "f", "arguments": {"a": 1}', '{"a": 1}'),
    ],
)
def test_objects_that_are_calls(body: str, arguments: str) -> None:
    found = read_every_way("hermes", f"<tool_call>{body}</tool_call>")
    assert (found.said, found.calls) == ("", [("f", arguments)])
    json.loads(arguments)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " \n ",
        "plain <tool_ call> text\n",
        "<tool_call>",
        "<tool_cal",
        "<tool_call>\n[1]\n</tool_call>",
        '<tool_call>{"name": "unknown", "arguments": {"a": 1}}</tool_call>',
        '<tool_call>{"name": 7}</tool_call>',
        '<tool_call>{"name" "f"}</tool_call>',
        '<tool_call>{"arguments": {"a": 1}}</tool_call>',
        '<tool_call>{"arguments": {"a": 1}, "name": "g"}</tool_call>',
        '<tool_call>{"arguments": {"a": 1',
        '<tool_call>{"na',
        '<tool_call>{"n\\',
        '<tool_call>{"x": "\\ud8"}',
        "<tool_call>{}</tool_call>",
        "a </tool_call> b",
    ],
)
def test_what_is_no_call_is_text(text: str) -> None:
    found = read_every_way("hermes", text)
    assert (found.said, found.calls) == (text, [])


@pytest.mark.parametrize(
    ("text", "arguments", "said"),
    [
        ('<tool_call>{"name": "f", "argu', "", ""),
        ('<tool_call>{"name": "f", "argu\\', "", ""),
        ('<tool_call>{"name": "f", "arguments": {"a": "b', '{"a": "b', ""),
        ('<tool_call>{"name": "f", "arguments": {"a": 1</tool_call> x', '{"a": 1', " x"),
        ('<tool_call>{"name": "f", "arguments": {"a": [1}}</tool_call>', '{"a": [1}}', ""),
        ('<tool_call>{"name": "f", "arguments": {\'a\': 1}}</tool_call>', "{'a': 1}}", ""),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}, oops}</tool_call>.', '{"a": 1}', ", oops}."),
        ('<tool_call>{"name": "f", arguments: {}}</tool_call>', ", arguments: {}}", ""),
    ],
)
def test_a_call_that_breaks_off_keeps_what_was_written(text: str, arguments: str, said: str) -> None:
    found = read_every_way("hermes", text)
    assert (found.said, found.calls) == (said, [("f", arguments)])


def test_a_mark_without_a_call_does_not_hide_the_next() -> None:
    found = read_every_way("hermes", f"<tool_call><tool_call>{{}}\n{CALL}")
    assert found.said == "<tool_call><tool_call>{}"
    assert found.calls == [("get_weather", ARGUMENTS)]


def test_limits() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    found = read_every_way("hermes", call * 130)
    assert len(found.calls) == 128
    assert found.said == call * 2
    open_calls = '<tool_call>{"name": "f"}' * 130
    assert len(read_every_way("hermes", open_calls).calls) == 128


def test_arguments_have_a_limit() -> None:
    arguments = '{"a": "' + "x" * 2**20 + '"}'
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    found = read(parser_of("hermes"), [text])
    assert read(parser_of("hermes"), [text[at : at + 999] for at in range(0, len(text), 999)]) == found
    assert found.calls == [("f", arguments[: 2**20])]
    assert found.said == arguments[2**20 :] + "}"


def test_the_limit_is_of_each_call() -> None:
    call = '<tool_call>{"name": "f", "arguments": {"a": "' + "x" * 600_000 + '"}}</tool_call>'
    assert read(parser_of("hermes"), [call * 2]).said == ""


def test_text_after_a_call_keeps_its_line_breaks() -> None:
    assert read_every_way("hermes", f"{CALL}\nDone.\n\n").said == "\nDone.\n\n"


def test_ids() -> None:
    parser = HermesFormat().parser(TOOLS, HermesFormat().ids())
    begun = [part for part in parser.feed(CALL * 2) if isinstance(part, CallBegun)]
    assert len({part.call_id for part in begun}) == 2
    assert all(part.call_id.startswith("call_") and len(part.call_id) == 29 for part in begun)


def test_no_tools_of_that_name_no_call() -> None:
    assert read_every_way("hermes", CALL, ()).said == CALL
    assert parser_of("hermes").feed("") == ()
