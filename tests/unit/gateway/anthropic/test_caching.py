"""`cache_control` on every kind of block becomes a breakpoint at the right place, or is refused."""

from typing import Any

import pytest

from tandem.gateway.anthropic.fields import MessagesPromptBody
from tandem.gateway.anthropic.prompt import read_prompt
from tandem.gateway.conversation import Breakpoint
from tandem.gateway.errors import RequestError

SHORT: dict[str, Any] = {"type": "ephemeral"}
LONG: dict[str, Any] = {"type": "ephemeral", "ttl": "1h"}
USER: dict[str, Any] = {"role": "user", "content": "hello"}


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "input_schema": {"type": "object"}, **more}


def text(text: str, control: Any = None) -> dict[str, Any]:
    return {"type": "text", "text": text, "cache_control": control}


def points(messages: list[Any], **more: Any) -> tuple[Breakpoint, ...]:
    return read_prompt(
        MessagesPromptBody(model="m", messages=messages, **more), max_messages=100
    ).conversation.breakpoints


def test_tools_come_first_then_the_system_prompt_then_messages() -> None:
    found = points(
        [{"role": "user", "content": [text("abc"), text("de", SHORT)]}],
        system=[text("xy", LONG), text("z")],
        tools=[tool("f"), tool("g", cache_control=LONG)],
        cache_control=SHORT,
    )
    assert found == (
        Breakpoint(3600.0, tool=1),
        Breakpoint(3600.0, message=0, offset=2),
        Breakpoint(300.0, message=1, offset=6),
    )


def test_calls_are_kept_to_where_the_next_message_begins_and_results_within() -> None:
    use = {"type": "tool_use", "id": "1", "name": "f", "input": {}, "cache_control": LONG}
    result = {"type": "tool_result", "tool_use_id": "1", "is_error": True, "cache_control": SHORT}
    result["content"] = [text("ab", LONG), text("c")]
    found = points([USER, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}])
    assert found == (
        Breakpoint(3600.0, message=2),
        Breakpoint(3600.0, message=2, offset=len("Error: ab")),
        Breakpoint(300.0, message=2, offset=len("Error: ab\nc")),
    )


def test_the_requests_own_breakpoint_is_at_the_end() -> None:
    assert points([USER], cache_control=LONG) == (Breakpoint(3600.0, message=0, offset=5),)
    assert points([{"role": "user", "content": ""}], cache_control=LONG) == ()
    marked = [{"role": "user", "content": [text("a", SHORT)]}]
    with pytest.raises(RequestError, match="different ttls"):
        points(marked, cache_control=LONG)
    assert len(points(marked, cache_control=SHORT)) == 1


def test_scopes_and_nulls_are_harmless() -> None:
    assert points([{"role": "user", "content": [text("a", SHORT | {"scope": "global", "ttl": None})]}])
    assert points([{"role": "user", "content": [text("a")]}]) == ()


@pytest.mark.parametrize(
    ("messages", "more", "words"),
    [
        ([{"role": "user", "content": [text("x", SHORT)] * 5}], {}, "messages.0.content.4 is one too many"),
        ([{"role": "user", "content": [text("x", SHORT)] * 4}, USER], {"cache_control": SHORT}, "one too many"),
        ([{"role": "user", "content": [text("x", SHORT), text("y", LONG)]}], {}, "content.1.cache_control has a ttl"),
        ([USER], {"tools": [tool("f", cache_control=SHORT)], "system": [text("x", LONG)]}, "system.0.cache_control"),
        ([USER], {"cache_control": {"type": "ephemeral", "ttl": "30m"}}, "'5m' or '1h'|\"5m\" or \"1h\""),
        ([USER], {"cache_control": {"type": "ephemeral", "ttl": ["5m"]}}, "cache_control"),
        ([USER], {"cache_control": {"type": "ephemeral", "until": 5}}, "cache_control"),
        ([USER], {"tools": [tool("f", cache_control="5m")]}, "tools.0.cache_control='5m'"),
    ],
)
def test_what_cannot_be_kept_is_refused(messages: list[Any], more: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        points(messages, **more)
