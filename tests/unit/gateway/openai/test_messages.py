"""Messages become what a text template takes, or are refused where they hold more."""

from typing import Any

import pytest

from tandem.gateway.errors import RequestError
from tandem.gateway.openai.messages import MessageReader, read_messages

CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
HOURS = {"type": "ephemeral", "ttl": "2h"}


def test_calls_and_their_results_become_what_templates_take() -> None:
    given: list[dict[str, Any]] = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "two"}]},
    ]
    called, answered = read_messages(given, 10)[1:]
    assert called["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    assert answered == {"role": "tool", "tool_call_id": "call_1", "content": "two"}


def test_breakpoints_of_both_apis_keep_what_lies_before_them() -> None:
    parts = [
        {"type": "text", "text": "abc", "prompt_cache_breakpoint": {"mode": "explicit"}},
        {"type": "text", "text": "de", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
        {"type": "text", "text": "f"},
    ]
    reader = MessageReader(default_lifetime_s=1800.0)
    reader.read([{"role": "user", "content": parts}], 10)
    assert [(point.offset, point.ttl_s, point.message) for point in reader.breakpoints] == [(3, 1800, 0), (6, 3600, 0)]


def test_breakpoints_are_counted() -> None:
    part = {"type": "text", "text": "x", "prompt_cache_breakpoint": {"mode": "explicit"}}
    with pytest.raises(RequestError, match="at most 4"):
        read_messages([{"role": "user", "content": [part] * 5}], 10)


def test_what_comes_after_one_breakpoint_too_many_is_not_read() -> None:
    part = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}
    with pytest.raises(RequestError, match=r"messages\[1\].content\[1\] is one too many"):
        read_messages([{"role": "user", "content": [part] * 3}, {"role": "user", "content": [part, part, None]}], 10)


def test_roles_parts_and_empty_answers_are_made_plain() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}]
    given: list[dict[str, Any]] = [
        {"role": "developer", "content": "rules"},
        {"role": "user", "content": parts, "name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": None},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}], "reasoning_content": "why"},
    ]
    assert read_messages(given, 10) == [
        {"role": "system", "content": "rules"},
        {"role": "user", "content": "a\nb", "name": "ann"},
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": "no", "reasoning_content": "why"},
    ]


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ('{"city": "Oslo",}', {"arguments": '{"city": "Oslo",}'}),
        ('{"city": "Os', {"arguments": '{"city": "Os'}),
        ("[1]", {"arguments": "[1]"}),
        ('{"a": NaN}', {"arguments": '{"a": NaN}'}),
        ("", {}),
        (None, {}),
    ],
)
def test_arguments_that_are_no_object_are_shown_as_they_were_written(written: str | None, shown: Any) -> None:
    """A model that erred could not be told so: its own call was refused when it came back with the tool's error."""
    call = CALL | {"function": {"name": "f", "arguments": written}}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "Error: no JSON"}
    read = read_messages([{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}, result], 10)
    assert read[1]["tool_calls"][0]["function"]["arguments"] == shown


def test_what_clients_keep_with_an_answer_asks_for_nothing() -> None:
    """They send our own answers back with it, and their tool loops ended at the second turn."""
    said: dict[str, Any] = {"refusal": None, "reasoning": None}
    litellm: dict[str, Any] = {"provider_specific_fields": said, "function_call": None, "audio": None}
    litellm["thinking_blocks"] = [{"type": "thinking", "thinking": "why", "signature": ""}]
    openai = {"id": "msg_1", "parsed": {"a": 1}, "annotations": [{"type": "url_citation"}], "refusal": None}
    others = {"reasoning_details": [{"type": "reasoning.text", "text": "why"}]}
    for kept in (litellm, openai, others):
        given = {"role": "assistant", "content": None, "tool_calls": [CALL], **kept}
        answered = {"role": "tool", "tool_call_id": "call_1", "content": "rain"}
        read = read_messages([{"role": "user", "content": "x"}, given, answered], 10)
        assert read[1].keys() == {"role", "content", "tool_calls"}
        with pytest.raises(RequestError, match="is not supported"):
            read_messages([{"role": "user", "content": "x", **kept}], 10)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "tool", "content": "x"}, "tool_call_id"),
        ({"role": "tool", "content": "x", "tool_call_id": "never"}, "tool_call_id"),
        ({"role": "function", "content": "x"}, "send tool_calls"),
        ({"role": "assistant", "tool_calls": [{}]}, r"tool_calls\[0\]"),
        ({"role": "user", "content": "x", "tool_calls": [CALL]}, "tool_calls"),
        ({"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f", "arguments": [1]}}]}, "arguments"),
        ({"role": "assistant", "tool_calls": [CALL | {"id": 1}]}, "an id"),
        ({"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {"type": "other"}}]}, "ephemeral"),
        ({"role": "user", "content": [{"type": "text", "text": "x", "prompt_cache_breakpoint": {}}]}, "explicit"),
        ({"role": "user", "content": [{"type": "text", "text": "x", "cache_control": HOURS}]}, "ttl"),
        ({"content": "x"}, "role"),
        ({"role": ["user"], "content": "x"}, "role"),
        ({"role": "user"}, "content"),
        ({"role": "user", "content": []}, "content"),
        ({"role": "user", "content": 5}, "content"),
        ({"role": "user", "content": ["x"]}, r"content\[0\]"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "text only"),
        ({"role": "user", "content": [{"type": "text", "text": 1}]}, r"content\[0\]"),
        ({"role": "user", "content": [{"type": "text", "text": "x", "image": 1}]}, r"content\[0\]"),
        ({"role": "user", "content": "x", "name": 1}, "name"),
        ({"role": "user", "content": "x", "audio": {"id": 1}}, "audio"),
    ],
)
def test_what_the_model_cannot_be_shown_is_refused(message: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words) as refusal:
        read_messages([{"role": "user", "content": "fine"}, message], 10)
    assert refusal.value.param is not None
    assert refusal.value.param.startswith("messages[1]")


@pytest.mark.parametrize(
    "role", ["developer", "system", "user", "assistant", "tool", "function", "", "nobody", None, 1, ["user"]]
)
@pytest.mark.parametrize("content", ["", "text", None, 1, [], [{"type": "text", "text": "part"}]])
@pytest.mark.parametrize("is_role_first", [True, False])
def test_a_message_of_text_alone_is_read_as_one_with_fields_that_say_nothing(
    role: Any, content: Any, is_role_first: bool
) -> None:
    message = {"role": role, "content": content} if is_role_first else {"content": content, "role": role}
    assert outcome(message) == outcome({**message, "name": None})


def outcome(message: dict[str, Any]) -> Any:
    """Fields of a message as read, in order, or the error with which it is refused."""
    try:
        return list(read_messages([message], 1)[0].items())
    except RequestError as error:
        return str(error)


def test_messages_are_counted() -> None:
    with pytest.raises(RequestError, match="at most 2"):
        read_messages([{"role": "user", "content": "x"}] * 3, 2)
