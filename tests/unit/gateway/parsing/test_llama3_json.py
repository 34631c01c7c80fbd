"""Llama 3's JSON calls: bare at the beginning of an answer, or after their mark."""

import pytest

from tandem.gateway.parsing.llama3_json import LlamaJsonFormat
from tandem.gateway.parts import CallArguments, CallBegun, ContentText
from tests.unit.gateway.parsing.reading import TOOLS, ids, read_every_way

CALL = '{"name": "f", "parameters": {"a": 1}}'
TAG = "<|python_tag|>"


@pytest.mark.parametrize(
    ("text", "said", "num_calls"),
    [
        (CALL, "", 1),
        (f"\n {CALL}\n", "", 1),
        (f"{CALL}; {CALL};{CALL}", "", 3),
        (f"{CALL}\n{CALL}", "", 2),
        (f"{TAG}{CALL}; {CALL}", "", 2),
        (f"Let me see. {TAG}\n{CALL}", "Let me see.", 1),
        (f"{CALL} done", " done", 1),
        (f"{CALL}; {{}}", "; {}", 1),
        (f"{CALL};", ";", 1),
        (f"{CALL}{TAG}{CALL}", "", 2),
        ('{"type": "function", "name": "f", "parameters": {"a": 1}}', "", 1),
        ('{"name": "f", "arguments": {"a": 1}}', "", 1),
    ],
)
def test_calls(text: str, said: str, num_calls: int) -> None:
    found = read_every_way("llama3_json", text)
    assert found.said == said
    assert found.calls == [("f", '{"a": 1}')] * num_calls


@pytest.mark.parametrize(
    "text",
    [
        f"It is {CALL}",
        '{"name": "f"}',
        '{"name": "f", "description": "a tool"}',
        '{"name": "unknown", "parameters": {}}',
        '{"answer": 42}',
        f'{TAG}brave_search.call(query="x")',
        "{",
        "  ",
        '{"parameters": {"a": 1}}',
    ],
)
def test_what_is_no_call_is_text(text: str) -> None:
    found = read_every_way("llama3_json", text)
    assert (found.said, found.calls) == (text, [])


def test_a_bare_object_is_a_call_when_its_arguments_begin() -> None:
    parser = LlamaJsonFormat().parser(TOOLS, ids())
    assert parser.feed('{"name": "f", "para') == []
    assert parser.feed('meters": {') == [CallBegun(0, "id0", "f"), CallArguments(0, "{")]


def test_a_marked_one_when_its_name_is_known() -> None:
    parser = LlamaJsonFormat().parser(TOOLS, ids())
    assert parser.feed(f'ok {TAG}{{"name": "f"') == [ContentText("ok"), CallBegun(0, "id0", "f")]


def test_a_broken_call_keeps_the_rest() -> None:
    found = read_every_way("llama3_json", '{"name": "f", "parameters": {"a": <1>} and so on')
    assert (found.said, found.calls) == ("", [("f", '{"a": <1>} and so on')])


def test_limit() -> None:
    found = read_every_way("llama3_json", "; ".join([CALL] * 130))
    assert len(found.calls) == 128
    assert found.said == f"; {CALL}; {CALL}"
