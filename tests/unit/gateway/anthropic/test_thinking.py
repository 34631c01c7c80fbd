"""Thinking in requests, and signatures of thinking blocks."""

from typing import Any

import pytest

from tandem.gateway.anthropic.fields import MessagesPromptBody
from tandem.gateway.anthropic.thinking import (
    RequestedThinking,
    Signature,
    check_budget,
    read_thinking,
    read_thinking_turns,
)
from tandem.gateway.conversation import Effort, Thinking
from tandem.gateway.errors import RequestError


def body(**more: Any) -> MessagesPromptBody:
    return MessagesPromptBody(model="m", messages=[], **more)


@pytest.mark.parametrize(
    ("thinking", "effort", "wanted"),
    [
        (None, None, RequestedThinking(Thinking())),
        (None, "low", RequestedThinking(Thinking(Effort.LOW))),
        ({"type": "adaptive"}, None, RequestedThinking(Thinking(Effort.HIGH))),
        ({"type": "adaptive", "display": "summarized"}, "max", RequestedThinking(Thinking(Effort.MAX))),
        ({"type": "disabled"}, "max", RequestedThinking(Thinking(Effort.NONE))),
        ({"type": "enabled", "budget_tokens": 1024}, None, RequestedThinking(Thinking(Effort.HIGH, 1024), True)),
        (
            {"type": "enabled", "budget_tokens": 5000, "display": "omitted"},
            "medium",
            RequestedThinking(Thinking(Effort.MEDIUM, 5000), True, is_shown=False),
        ),
    ],
)
def test_kinds_and_efforts(thinking: Any, effort: Any, wanted: RequestedThinking) -> None:
    assert read_thinking(body(thinking=thinking, output_config={"effort": effort})) == wanted


@pytest.mark.parametrize(
    ("thinking", "effort", "words"),
    [
        ({}, None, "thinking.type=None"),
        ({"type": "between_tools"}, None, "thinking.type='between_tools'"),
        ({"type": "enabled"}, None, "budget_tokens=None"),
        ({"type": "enabled", "budget_tokens": 1023}, None, "from 1024 up"),
        ({"type": "enabled", "budget_tokens": True}, None, "budget_tokens=True"),
        ({"type": "enabled", "budget_tokens": 2**31}, None, "budget_tokens"),
        ({"type": "adaptive", "budget_tokens": 2000}, None, "thinking.budget_tokens=2000"),
        ({"type": "adaptive", "display": "loud"}, None, "display='loud'"),
        ({"type": "disabled", "display": "omitted"}, None, "thinking.display"),
        (None, "none", "output_config.effort='none'"),
        (None, ["low"], "output_config.effort"),
    ],
)
def test_what_cannot_be_honoured_is_refused(thinking: Any, effort: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        read_thinking(body(thinking=thinking, output_config={"effort": effort}))


def test_a_budget_leaves_room_for_an_answer() -> None:
    asked = RequestedThinking(Thinking(budget=1024))
    check_budget(asked, 1025)
    check_budget(RequestedThinking(Thinking(Effort.MAX)), 1)
    with pytest.raises(RequestError, match="below max_tokens=1024"):
        check_budget(asked, 1024)


@pytest.mark.parametrize(
    ("management", "words"),
    [
        ({"edits": [{"type": "clear_tool_uses_20250919"}]}, "clear_tool_uses_20250919"),
        ({"edits": [{"type": "compact_20260112"}]}, "compact_20260112"),
        ({"edits": "all"}, "edits='all'"),
        ({"edits": [5]}, "edits.0.type=None"),
        ({"edits": [{"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 0}}]}, "keep="),
        ({"edits": [{"type": "clear_thinking_20251015", "keep": "some"}]}, "keep='some'"),
        ({"edits": [{"type": "clear_thinking_20251015", "trigger": 5}]}, "trigger"),
        ({"enabled": True}, "context_management.enabled"),
    ],
)
def test_other_edits_of_the_context_are_refused(management: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        read_thinking_turns(body(context_management=management))


def test_a_signature_is_of_the_text_however_it_came() -> None:
    pieces = Signature("a")
    pieces.add("bé\ud800")
    assert pieces.value == Signature("abé\ud800").value
    assert Signature("a").value != Signature("b").value
