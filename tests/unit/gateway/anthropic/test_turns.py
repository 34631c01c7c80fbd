"""Calls and their results, and which thinking a model is shown again."""

from typing import Any

import pytest

from tandem.gateway.anthropic.fields import MessagesPromptBody
from tandem.gateway.anthropic.prompt import read_prompt
from tandem.gateway.errors import RequestError


def messages_of(*turns: Any, **more: Any) -> list[Any]:
    """`turns`: the user's, the assistant's, and so on."""
    roles = ("user", "assistant")
    given = [{"role": roles[index % 2], "content": content} for index, content in enumerate(turns)]
    return list(
        read_prompt(MessagesPromptBody(model="m", messages=given, **more), max_messages=100).conversation.messages
    )


def use(call_id: str, **more: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": f"f_{call_id}", "input": {"x": 1}, **more}


def result(call_id: str, content: Any = "done", **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **more}


def thought(text: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": text, "signature": "anything"}


def said(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def test_calls_and_results_become_what_templates_take() -> None:
    _, called, first, second, last = messages_of(
        "hi",
        [said("I look."), use("toolu_123456789"), use("b", caller={"type": "direct"})],
        [result("b", None), result("toolu_123456789", [said("o"), said("k")], is_error=True), said("and?")],
    )
    function = {"name": "f_toolu_123456789", "arguments": {"x": 1}}
    assert called["content"] == "I look."
    assert called["tool_calls"][0] == {"id": "123456789", "type": "function", "function": function}
    assert first == {"role": "tool", "tool_call_id": "b", "name": "f_b", "content": ""}
    assert (second["tool_call_id"], second["content"]) == ("123456789", "Error: o\nk")
    assert last == {"role": "user", "content": "and?"}


def test_neighbours_of_one_role_are_one_turn() -> None:
    given: list[Any] = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": [use("1")]},
        {"role": "assistant", "content": [use("2")]},
        {"role": "user", "content": [result("2")]},
        {"role": "user", "content": [result("1")]},
    ]
    messages = read_prompt(MessagesPromptBody(model="m", messages=given), max_messages=100).conversation.messages
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool"]
    assert messages[0]["content"] == "a\nb"


def test_thinking_is_shown_again_within_a_turn_of_tools_only() -> None:
    messages = messages_of(
        "one",
        [thought("old"), said("yes")],
        "two",
        [thought("plan"), {"type": "redacted_thinking", "data": "…"}, use("1")],
        [result("1"), said("reminder")],
        [thought("more"), use("2")],
        [result("2")],
    )
    assert [message.get("reasoning_content") for message in messages if message["role"] == "assistant"] == [
        None,
        "plan",
        "more",
    ]


@pytest.mark.parametrize(
    ("keep", "kept"),
    [("all", ["a", "b", "c"]), ({"type": "all"}, ["a", "b", "c"]), (2, ["b", "c"]), (1, ["c"]), (None, ["c"])],
)
def test_what_is_kept_of_earlier_turns_can_be_said(keep: Any, kept: list[str]) -> None:
    keep = {"type": "thinking_turns", "value": keep} if isinstance(keep, int) else keep
    edits = [{"type": "clear_thinking_20251015", "keep": keep}]
    turns = [part for name in "abc" for part in ("q", [thought(name), said(name)])]
    messages = messages_of(*turns, "q", context_management={"edits": edits})
    assert [message["reasoning_content"] for message in messages if "reasoning_content" in message] == kept


@pytest.mark.parametrize(
    ("turns", "words"),
    [
        (("hi", "yes", [result("1")]), "messages.2.content.0.tool_use_id='1' must be the id of a tool_use"),
        (("hi", [use("1")], [result("2")]), "tool_use_id='2'"),
        (("hi", [use("1")], [result("1"), result("1")]), "answer it once"),
        (("hi", [use("1")], [result("1")], "ok", [result("1")]), "messages.4.content.0.tool_use_id='1'"),
        (("hi", [use("1"), use("1")], [result("1")]), "the id of another"),
        (("hi", [use("1"), use("2")], [result("1")]), "messages.1.content.1: the tool_use '2' has no tool_result"),
        (("hi", [use("1")], "well"), "the tool_use '1' has no tool_result"),
        (("hi", [use("1")]), "whose results must follow"),
        (("hi", [use("1")], [said("x"), result("1")]), "before the text"),
        (("hi", [use("1")], [result("1", [{"type": "image"}])]), "messages.2.content.0.content.0 is of type 'image'"),
        (("hi", [use("1")], [result("1", is_error="yes")]), "is_error='yes'"),
        (("hi", [use("1")], [result("1", 5)]), "messages.2.content.0.content=5"),
        (("hi", [use("1", input="x")], [result("1")]), "messages.1.content.0.input='x'"),
        (("hi", [use("1", name="a b")], [result("1")]), "messages.1.content.0.name='a b'"),
        (("hi", [use("1", caller={"type": "code"})], [result("1")]), "caller"),
        (("hi", [use("")], [result("")]), "messages.1.content.0.id=''"),
        (("hi", [{"type": "thinking", "thinking": 5}], "x"), "messages.1.content.0.thinking=5"),
    ],
)
def test_calls_and_results_that_do_not_match_are_refused(turns: tuple[Any, ...], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        messages_of(*turns)
