"""Mistral's calls: a list after the mark, or name and arguments."""

import re

import pytest

from tandem.gateway.parsing.mistral import MistralFormat
from tandem.gateway.parts import CallArguments, CallBegun
from tests.unit.gateway.parsing.reading import TOOLS, ids, read_every_way

ONE = '{"name": "f", "arguments": {"a": 1}}'


@pytest.mark.parametrize(
    ("text", "said", "num_calls"),
    [
        (f"[TOOL_CALLS][{ONE}]", "", 1),
        (f"[TOOL_CALLS] [{ONE}, {ONE} ,{ONE}]\n", "", 3),
        (f"Well.\n[TOOL_CALLS][{ONE}]", "Well.", 1),
        (f"[TOOL_CALLS][{ONE}", "", 1),
        (f"[TOOL_CALLS][{ONE},", ",", 1),
        (f"[TOOL_CALLS][{ONE}] then", " then", 1),
        (f"[TOOL_CALLS][{ONE}, 1]", ", 1]", 1),
        (f"[TOOL_CALLS][{ONE}][TOOL_CALLS][{ONE}]", "", 2),
        ('[TOOL_CALLS]f[ARGS]{"a": 1}', "", 1),
        ('[TOOL_CALLS]f {"a": 1}', "", 1),
        ('[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]f[ARGS]{"a": 1}', "", 2),
        ('[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a": 1}', "", 1),
    ],
)
def test_calls(text: str, said: str, num_calls: int) -> None:
    found = read_every_way("mistral", text)
    assert found.said == said
    assert found.calls == [("f", '{"a": 1}')] * num_calls


@pytest.mark.parametrize(
    "text",
    [
        "[TOOL_CALLS]",
        "[TOOL_CALLS][]",
        "[TOOL_CALLS][1]",
        "[TOOL_CALLS]unknown[ARGS]{}",
        "[TOOL_CALLS]f[ARGS][1]",
        "[TOOL_CALLS]f",
        "[TOOL_CALLS]f[CALL_ID]abc",
        "[TOOL_CA",
        "[TOOL] f",
    ],
)
def test_what_is_no_call_is_text(text: str) -> None:
    found = read_every_way("mistral", text)
    assert (found.said, found.calls) == (text, [])


def test_truncated_and_broken() -> None:
    assert read_every_way("mistral", '[TOOL_CALLS]f[ARGS]{"a": "b').calls == [("f", '{"a": "b')]
    found = read_every_way("mistral", '[TOOL_CALLS]f[ARGS]{"a": ?}[TOOL_CALLS]f[ARGS]{}')
    assert found.calls == [("f", '{"a": ?}'), ("f", "{}")]


def test_a_named_call_streams_and_keeps_the_models_id() -> None:
    parser = MistralFormat().parser(TOOLS, ids())
    assert parser.feed("[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]") == []
    assert parser.feed('{"c') == [CallBegun(0, "abcdefghi", "get_weather"), CallArguments(0, '{"c')]


def test_an_id_of_another_form_is_replaced() -> None:
    parser = MistralFormat().parser(TOOLS, ids())
    assert parser.feed("[TOOL_CALLS]f[CALL_ID]abc[ARGS]{")[0] == CallBegun(0, "id0", "f")


def test_an_id_of_another_call_is_replaced() -> None:
    parser = MistralFormat().parser(TOOLS, ids(), ["abcdefghi"])
    written = ("abcdefghi", "123456789", "123456789")
    parts = parser.feed("".join(f"[TOOL_CALLS]f[CALL_ID]{call_id}[ARGS]{{}}" for call_id in written))
    assert [part.call_id for part in parts if isinstance(part, CallBegun)] == ["id0", "123456789", "id1"]


def test_ids_are_those_its_templates_take() -> None:
    (call_id, other) = (next(made) for made in [MistralFormat().ids()] * 2)
    assert re.fullmatch("[a-zA-Z0-9]{9}", call_id)
    assert call_id != other


@pytest.mark.parametrize("call", ['[TOOL_CALLS]f[ARGS]{"a": 1}', f"[TOOL_CALLS][{ONE}]"])
def test_limit(call: str) -> None:
    found = read_every_way("mistral", call * 130)
    assert len(found.calls) == 128
    assert found.said == call * 2


def test_limit_within_a_list() -> None:
    found = read_every_way("mistral", f"[TOOL_CALLS][{', '.join([ONE] * 130)}]")
    assert len(found.calls) == 128
    assert found.said == f", {ONE}, {ONE}]"
