"""Conversation made of Anthropic's bodies, and refusals by place."""

import contextlib
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.gateway.anthropic.fields import MessagesPromptBody, read_body
from tandem.gateway.anthropic.prompt import read_prompt
from tandem.gateway.conversation import Conversation, Effort
from tandem.gateway.errors import RequestError

USER = {"role": "user", "content": "hi"}


MORE = sorted(MessagesPromptBody.model_fields.keys() - {"messages", "model"})
KINDS = ["text", "tool_use", "tool_result", "thinking", "redacted_thinking", "image"]
WORDS = [
    *KINDS,
    "user",
    "assistant",
    "auto",
    "any",
    "tool",
    "enabled",
    "adaptive",
    "ephemeral",
    "1h",
    "5m",
    "all",
    "id",
]
NAMES = [
    "type",
    "text",
    "id",
    "name",
    "input",
    "tool_use_id",
    "content",
    "thinking",
    "cache_control",
    "ttl",
    "is_error",
]
NAMES += ["input_schema", "budget_tokens", "effort", "format", "schema", "edits", "keep", "display", "citations", "x"]


def blocks_of(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Lists of what is nearly a block."""
    optional = {name: inner for name in NAMES if name not in ("type", "text")}
    block = st.fixed_dictionaries({"type": st.sampled_from(KINDS), "text": st.text(max_size=3)}, optional=optional)
    return st.lists(block, max_size=3)


def read(messages: list[Any], **more: Any) -> Conversation:
    return read_prompt(MessagesPromptBody(model="m", messages=messages, **more), max_messages=10).conversation


def block(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **more}


def test_texts_are_joined_and_the_system_prompt_comes_first() -> None:
    turn = {"role": "assistant", "content": [{"type": "thinking", "thinking": "…", "signature": "s"}, block("yes")]}
    asked = {"role": "user", "content": [block("a"), block("b", citations=None)]}
    assert read([USER, turn, asked], system=[block("x"), block("y")]).messages == [
        {"role": "system", "content": "x\ny"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "a\nb"},
    ]
    assert read([{"role": "system", "content": "s"}, USER]).messages[0] == {"role": "system", "content": "s"}


def test_a_clients_accounting_is_no_part_of_the_system_prompt() -> None:
    header = "x-anthropic-billing-header: cch=12345;"
    for system in (f"{header}\nbe brief", [block(header), block("be brief")], [block(f"{header}\nbe brief")]):
        assert read([USER], system=system).messages[0] == {"role": "system", "content": "be brief"}
    assert [message["role"] for message in read([USER], system=[block(header)]).messages] == ["user"]
    said = read([{"role": "user", "content": header}]).messages[0]
    assert said["content"] == header


def test_the_last_message_of_the_assistants_is_gone_on_with() -> None:
    begun = read([USER, {"role": "assistant", "content": "It is"}], thinking={"type": "adaptive"})
    assert (begun.is_continued, begun.thinking.effort) == (True, Effort.NONE)
    assert read([USER]).is_continued is False


@pytest.mark.parametrize(
    ("messages", "more", "words"),
    [
        ([], {}, "messages is empty"),
        ([USER] * 11, {}, "11 entries"),
        ([{"role": "robot", "content": "x"}], {}, "messages.0.role='robot'"),
        ([{"content": "x"}], {}, "messages.0.role=None"),
        ([{"role": ["user"], "content": "x"}], {}, "messages.0.role"),
        ([USER, {"role": "user"}], {}, "messages.1.content=None"),
        ([{**USER, "name": "x"}], {}, "messages.0.name"),
        ([{"role": "user", "content": [{"type": "image"}]}], {}, "messages.0.content.0 is of type 'image'"),
        ([{"role": "user", "content": [{"type": "document"}]}], {}, "messages.0.content.0 is of type 'document'"),
        ([{"role": "user", "content": [{"type": ["text"]}]}], {}, "messages.0.content.0 is of type"),
        ([{"role": "user", "content": [{"type": "tool_use"}]}], {}, "messages.0.content.0 is of type 'tool_use'"),
        ([{"role": "user", "content": ["x"]}], {}, "messages.0.content.0"),
        ([{"role": "user", "content": [block("x", colour="red")]}], {}, "messages.0.content.0.colour='red'"),
        ([{"role": "user", "content": [block("x", citations=[{}])]}], {}, "messages.0.content.0.citations="),
        ([{"role": "user", "content": [block("x")] * 4097}], {}, "4097 blocks; at most 4096"),
        ([USER, {"role": "assistant", "content": "It is "}], {}, "white space"),
        ([USER, {"role": "assistant", "content": []}], {}, "white space"),
        (
            [USER, {"role": "assistant", "content": "It"}],
            {"thinking": {"type": "enabled", "budget_tokens": 1024}},
            "cannot be enabled",
        ),
        ([USER], {"system": [{"type": "image"}]}, "system.0"),
        ([USER], {"system": [block("x", cache_control={"type": "for ever"})]}, "system.0.cache_control"),
        ([USER], {"system": [block("", cache_control={"type": "ephemeral"})]}, "system.0.cache_control"),
    ],
)
def test_what_the_model_cannot_be_shown_is_refused(messages: list[Any], more: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words.replace("(", r"\(")):
        read(messages, **more)


LEAVES = st.one_of(st.none(), st.booleans(), st.integers(-5, 5000), st.text(max_size=4), st.sampled_from(WORDS))
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(NAMES), inner, max_size=5), blocks_of(inner)
    ),
    max_leaves=12,
)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system"]), "content": VALUES}), max_size=4
)


@given(st.fixed_dictionaries({"messages": MESSAGES}, optional=dict.fromkeys(MORE, VALUES)))
@settings(max_examples=150, deadline=None)
def test_any_body_is_read_or_refused(given_body: dict[str, Any]) -> None:
    body = {"model": "m", **given_body}
    with contextlib.suppress(RequestError):
        read_prompt(read_body(MessagesPromptBody, orjson.dumps(body)), max_messages=10)
