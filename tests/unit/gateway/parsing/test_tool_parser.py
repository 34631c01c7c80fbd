"""Contract of every family's parser, whatever the model writes and however it is cut."""

import json
import time
from collections.abc import Sequence
from itertools import pairwise
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.gateway.parsing import output
from tandem.gateway.parsing.tool_formats import NAMES
from tests.unit.gateway.parsing.reading import TOOLS, parser_of, read

ARGUMENTS = st.dictionaries(
    st.text(max_size=5),
    st.recursive(st.integers() | st.text(max_size=8) | st.booleans(), st.lists, max_leaves=3),
    max_size=3,
)
MARKS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<|python_start|>")
CALLS = ('{"name": "f", "arguments": {"a": 1}}', '{"name": "f"', ', "parameters": {"b": "}"}}', "f(a=1)", "[f(", "{}")
FRAGMENTS = st.sampled_from([*MARKS, *CALLS, "; ", "<tool_", "name", "null", *"[]{}()\"'\\,: \nfé"])


def pieces_of(text: str, cuts: Sequence[int]) -> list[str]:
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[start:end] for start, end in pairwise(places)]


@pytest.mark.parametrize("name", NAMES)
@given(st.lists(FRAGMENTS, max_size=25).map("".join), st.lists(st.integers(0, 500), max_size=8))
def test_cuts_do_not_matter(name: str, text: str, cuts: list[int]) -> None:
    whole = read(parser_of(name), [text])
    assert read(parser_of(name), pieces_of(text, cuts)) == whole
    assert read(parser_of(name), list(text)) == whole
    if not whole.calls:
        assert whole.said == text


@pytest.mark.parametrize("name", NAMES)
@given(st.lists(FRAGMENTS, max_size=25).map("".join), st.lists(st.integers(0, 500), max_size=8))
def test_cuts_do_not_matter_past_the_limit_on_arguments(name: str, text: str, cuts: list[int]) -> None:
    """Regression: control characters and marks in the excess were read differently with each cut."""
    with mock.patch.object(output, "MAX_ARGUMENTS_CHARACTERS", 3):
        whole = read(parser_of(name), [text])
        assert read(parser_of(name), pieces_of(text, cuts)) == whole
        assert read(parser_of(name), list(text)) == whole


@pytest.mark.parametrize("inside", ["\n" * 9, "<tool_call>", '[TOOL_CALLS]f{"a": 1}', "<|python_start|>[f()]"])
@pytest.mark.parametrize("name", NAMES)
def test_the_excess_of_arguments_is_the_same_however_it_is_cut(name: str, inside: str) -> None:
    text = written(name, [("f", {"a": "?"})]).replace("?", f"bcd{inside}efg")
    with mock.patch.object(output, "MAX_ARGUMENTS_CHARACTERS", 8):
        whole = read(parser_of(name), [text])
        assert len(whole.calls) == 1
        assert read(parser_of(name), list(text)) == whole


def written(name: str, calls: Sequence[tuple[str, dict[str, object]]]) -> str:
    """Calls as the family writes them."""
    objects = [json.dumps({"name": tool, "arguments": arguments}, ensure_ascii=False) for tool, arguments in calls]
    match name:
        case "hermes":
            return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in objects)
        case "mistral":
            return f"[TOOL_CALLS][{', '.join(objects)}]"
        case "llama3_json":
            return "; ".join(call.replace('"arguments"', '"parameters"', 1) for call in objects)
    keywords = [", ".join(f"{key}={value!r}" for key, value in arguments.items()) for _, arguments in calls]
    return f"[{', '.join(f'{tool}({words})' for (tool, _), words in zip(calls, keywords, strict=True))}]"


@pytest.mark.parametrize("name", NAMES)
@given(
    st.lists(st.tuples(st.sampled_from([tool.name for tool in TOOLS]), ARGUMENTS), min_size=1, max_size=4),
    st.lists(st.integers(0, 500), max_size=8),
    st.sampled_from(["", "\n", "Let me see.\n\n"]),
)
def test_calls_are_read_back(
    name: str, calls: list[tuple[str, dict[str, object]]], cuts: list[int], before: str
) -> None:
    if name == "llama_pythonic":
        calls = [(tool, {f"k{index}": value for index, value in enumerate(found.values())}) for tool, found in calls]
    if name.startswith("llama"):
        before = before if before.isspace() else ""
    found = read(parser_of(name), pieces_of(before + written(name, calls), cuts))
    assert [(tool, json.loads(arguments)) for tool, arguments in found.calls] == calls
    assert found.said == before.rstrip()


ADVERSARIES = {
    "marks": "<tool_call>[TOOL_CALLS]<|python_tag|><|python_start|>[" * 7_500,
    "heads": '<tool_call>{"a":"[TOOL_CALLS][{"b":"<|python_tag|>{"' * 7_500,
    "spaces": " \n" * 200_000,
    "deep": '<tool_call>{"name": "f", "arguments": ' + '{"a":[' * 50_000,
    "quotes": '[TOOL_CALLS][{"name": "' + '\\"' * 200_000,
    "ends": "<tool_call></tool_call" * 20_000,
    "pythonic": "[f(a=" + "[" * 200_000,
    "string": "<|python_start|>[f(a='" + "\\'" * 200_000,
    "object": '{"name": "f", "parameters": {"a": "' + "x{" * 200_000,
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("adversary", list(ADVERSARIES))
def test_time_grows_with_the_text_and_no_faster(name: str, adversary: str) -> None:
    """A bug of the kind that this looks for takes minutes."""
    text = ADVERSARIES[adversary]
    began = time.process_time()
    found = read(parser_of(name), [text[at : at + 64] for at in range(0, len(text), 64)])
    assert read(parser_of(name), [text]).calls == found.calls
    assert time.process_time() - began < 6
