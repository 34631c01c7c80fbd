"""Thinking apart from what follows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.gateway.parsing.thinking_parser import ThinkingParser
from tandem.gateway.parts import ContentText, PlainParser, Thought
from tests.unit.gateway.parsing.reading import Reading, parser_of, read


def parser(*, is_open: bool, tools: bool = False) -> ThinkingParser:
    return ThinkingParser("<think>", "</think>", parser_of("hermes") if tools else PlainParser(), is_open=is_open)


def read_every_way(text: str, *, is_open: bool) -> Reading:
    whole = read(parser(is_open=is_open), [text])
    assert read(parser(is_open=is_open), list(text)) == whole
    return whole


@pytest.mark.parametrize(
    ("text", "thought", "said"),
    [
        ("<think>\nHm.\n\nYes.\n</think>\n\nHi\n", "Hm.\n\nYes.", "Hi\n"),
        ("\n<think> a </think> b", " a ", " b"),
        ("<think>\n\n</think>\n\nHi", "", "Hi"),
        ("<think></think>", "", ""),
        ("<think>a", "a", ""),
        ("<think>a\n</thin", "a\n</thin", ""),
        ("<think>a </ b </think>c</think>", "a </ b ", "c</think>"),
        ("<think>a</think>b<think>c</think>", "a", "b<think>c</think>"),
        ("Hi <think>a</think>", "", "Hi <think>a</think>"),
        ("\n Hi", "", "\n Hi"),
        ("<thin", "", "<thin"),
        ("a</think>b", "", "a</think>b"),
        ("", "", ""),
        (" \n", "", " \n"),
    ],
)
def test_a_prompt_that_leaves_it_to_the_model(text: str, thought: str, said: str) -> None:
    found = read_every_way(text, is_open=False)
    assert (found.thought, found.said) == (thought, said)


@pytest.mark.parametrize(
    ("text", "thought", "said"),
    [
        ("\nHm.\n</think>\n\nHi", "Hm.", "Hi"),
        (" Hm", " Hm", ""),
        ("<think>\nHm</think>Hi", "Hm", "Hi"),
        ("a <think> b</think>Hi", "a <think> b", "Hi"),
        ("</think>Hi", "", "Hi"),
        ("\n\n", "", ""),
        ("<thi", "<thi", ""),
    ],
)
def test_a_prompt_that_ends_inside(text: str, thought: str, said: str) -> None:
    found = read_every_way(text, is_open=True)
    assert (found.thought, found.said) == (thought, said)


def test_thinking_streams() -> None:
    found = parser(is_open=False)
    assert found.feed("<think>\n") == []
    assert found.feed("Hm.\n") == [Thought("Hm.")]
    assert found.feed("So </") == [Thought("\nSo ")]
    assert found.feed("think>\n") == []
    assert found.feed("\nHi") == [ContentText("Hi")]
    assert list(found.feed(" you")) == [ContentText(" you")]
    assert list(found.finish()) == []


def test_an_answer_that_does_not_think_is_not_held_back() -> None:
    assert parser(is_open=False).feed("<b>") == [ContentText("<b>")]


def test_calls_within_thinking_are_thoughts() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    for pieces in ([f"{call}</think>\n\n{call}"], list(f"{call}</think>\n\n{call}")):
        found = read(parser(is_open=True, tools=True), pieces)
        assert (found.thought, found.said, found.calls) == (call, "", [("f", "{}")])


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<th", "</", "\n", " ", "a", ">"]), max_size=12).map("".join),
    st.booleans(),
)
def test_cuts_do_not_matter(text: str, is_open: bool) -> None:
    found = read_every_way(text, is_open=is_open)
    assert len(found.thought) + len(found.said) <= len(text)
