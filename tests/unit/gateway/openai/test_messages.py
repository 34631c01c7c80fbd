"""Messages become what a text template takes, or are refused where they hold more."""

from typing import Any

import pytest

from tandem.gateway.errors import RequestError
from tandem.gateway.openai.messages import read_messages


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
    ("message", "words"),
    [
        ({"role": "tool", "content": "x"}, "tool calls"),
        ({"role": "assistant", "tool_calls": [{}]}, "tool calls"),
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


def test_messages_are_counted() -> None:
    with pytest.raises(RequestError, match="at most 2"):
        read_messages([{"role": "user", "content": "x"}] * 3, 2)
