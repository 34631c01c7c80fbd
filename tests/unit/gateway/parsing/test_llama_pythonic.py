"""Pythonic calls: lists of calls with keyword arguments, turned into JSON at each call's end."""

import json

import pytest

from tandem.gateway.parsing.llama_pythonic import PythonicFormat
from tandem.gateway.parts import CallArguments, CallBegun
from tests.unit.gateway.parsing.reading import TOOLS, ids, read_every_way


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("[f()]", [("f", {})]),
        ('[get_weather(city="Paris"), f(x=1)]', [("get_weather", {"city": "Paris"}), ("f", {"x": 1})]),
        (" [ f ( ) ]", []),
        (
            "[ f(x = -1.5, y=[1, (2,)], z={'k': None}) , f() ]\n",
            [("f", {"x": -1.5, "y": [1, [2]], "z": {"k": None}}), ("f", {})],
        ),
        ("[ns.get-it(q=\"a)]\\\"b\", r='it\\'s')]", [("ns.get-it", {"q": 'a)]"b', "r": "it's"})]),
        ('[get_weather("東京", 2)]', [("get_weather", {"city": "東京", "days": 2})]),
        ("[f(a=True, b=false, c=null)]", [("f", {"a": True, "b": False, "c": None})]),
        ("<|python_start|>[f(a=1)]<|python_end|>", [("f", {"a": 1})]),
        ("[f(a=1)", [("f", {"a": 1})]),
        ('[f(a="x\ny")]', [("f", {"a": "x\ny"})]),
        ('[f(a="\\ud83d\\ude00")]', [("f", {"a": "😀"})]),
    ],
)
def test_calls(text: str, calls: list[tuple[str, dict[str, object]]]) -> None:
    found = read_every_way("llama_pythonic", text)
    assert [(name, json.loads(arguments)) for name, arguments in found.calls] == calls
    assert found.said == ("" if calls else text)


@pytest.mark.parametrize(
    "text",
    ["[1, 2]", "[unknown(a=1)]", "[f]", "[", "see [f(a=1)]", "[f, g]", "<|python_start|>print(1)", "[[f()]]", ""],
)
def test_what_is_no_call_is_text(text: str) -> None:
    found = read_every_way("llama_pythonic", text)
    assert (found.said, found.calls) == (text, [])


@pytest.mark.parametrize(
    ("text", "arguments", "said"),
    [
        ('[f(a="x', '(a="x', ""),
        ("[f(a=1+1), f()]", "(a=1+1)", ""),
        ("[f(a=open('x'))]", "(a=open('x'))", ""),
        ("[f(1)]", "(1)", ""),
        ("[f(a=1, a=2)]", "(a=1, a=2)", ""),
        ("[f(a=1] and more", "(a=1] and more", ""),
        ("[f(a=1e999)]", "(a=1e999)", ""),
        (f"[f(a={'[' * 100}{']' * 100})]", f"(a={'[' * 100}{']' * 100})", ""),
        (f"[f(a={'9' * 5000})]", f"(a={'9' * 5000})", ""),
        ("[f(a=1), g(b=2)]", '{"a": 1}', ", g(b=2)]"),
        ("[f(a=1) or", '{"a": 1}', " or"),
        ('[f(a="\\ud800")]', '{"a": "\\ud800"}', ""),
    ],
)
def test_odd_calls(text: str, arguments: str, said: str) -> None:
    found = read_every_way("llama_pythonic", text)
    assert found.calls[0] == ("f", arguments)
    assert found.said == said


def test_the_name_comes_first_then_the_arguments_at_once() -> None:
    parser = PythonicFormat().parser(TOOLS, ids())
    assert parser.feed("[f") == []
    assert parser.feed("(") == [CallBegun(0, "id0", "f")]
    assert parser.feed("a=1") == []
    assert parser.feed(")") == [CallArguments(0, '{"a": 1}')]


def test_limit() -> None:
    found = read_every_way("llama_pythonic", "[" + ", ".join(["f()"] * 130) + "]")
    assert len(found.calls) == 128
    assert found.said == ", f(), f()]"
