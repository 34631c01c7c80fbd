"""What of Anthropic's conversations a text model can be shown, and what is refused by its place."""

from typing import Any

import pytest

from tandem.gateway.anthropic.fields import PromptBody
from tandem.gateway.anthropic.prompt import read_prompt
from tandem.gateway.errors import RequestError

USER = {"role": "user", "content": "hi"}


def prompt(messages: list[Any], system: Any = None, max_messages: int = 10) -> list[dict[str, str]]:
    return read_prompt(PromptBody(model="m", messages=messages, system=system), max_messages)


def block(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **more}


def test_texts_are_joined_and_the_system_prompt_comes_first() -> None:
    cached = {"type": "ephemeral", "ttl": "1h"}
    turn = {"role": "assistant", "content": [{"type": "thinking", "thinking": "…", "signature": "s"}, block("yes")]}
    asked = {"role": "user", "content": [block("a", cache_control=cached), block("b", citations=None)]}
    assert prompt([USER, turn, asked], [block("x"), block("y")]) == [
        {"role": "system", "content": "x\ny"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "a\nb"},
    ]
    assert prompt([{"role": "system", "content": "s"}, USER])[0] == {"role": "system", "content": "s"}


@pytest.mark.parametrize(
    ("messages", "system", "words"),
    [
        ([], None, "messages is empty"),
        ([USER] * 11, None, "11 entries"),
        ([{"role": "robot", "content": "x"}], None, "messages.0.role='robot'"),
        ([USER, {"role": "user"}], None, "messages.1.content=None"),
        ([{**USER, "name": "x"}], None, "messages.0.name"),
        ([{"role": "user", "content": [{"type": "image"}]}], None, "messages.0.content.0 is of type 'image'"),
        ([{"role": "user", "content": [{"type": "tool_result"}]}], None, "tool calls"),
        ([{"role": "user", "content": ["x"]}], None, "messages.0.content.0"),
        ([{"role": "user", "content": [block("x", colour="red")]}], None, "messages.0.content.0 must be"),
        ([USER, {"role": "assistant", "content": "I"}], None, "the assistant's"),
        ([USER], [{"type": "image"}], "system.0"),
        ([USER], [block("x", cache_control={"type": "for ever"})], "system.0.cache_control"),
        ([USER], [block("x", cache_control={"type": "ephemeral"})] * 5, "at most 4"),
    ],
)
def test_what_the_model_cannot_be_shown_is_refused(messages: list[Any], system: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words.replace("(", r"\(")):
        prompt(messages, system)
