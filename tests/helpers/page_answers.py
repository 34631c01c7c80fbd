"""Answers of a model that thinks and calls tools, as both APIs stream them, and what a page must send back for them."""

import json
from typing import Any

ATTACK = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>'


def chunk(delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}


def called(index: int, name: str, arguments: str) -> list[dict[str, Any]]:
    """OpenAI's chunks of one tool call."""
    begin = {"index": index, "id": f"call_{index}", "type": "function", "function": {"name": name, "arguments": ""}}
    rest = {"index": index, "function": {"arguments": arguments}}
    return [chunk({"tool_calls": [begin]}), chunk({"tool_calls": [rest]})]


OPENAI_USAGE = {"prompt_tokens": 9, "completion_tokens": 8, "completion_tokens_details": {"reasoning_tokens": 5}}
OPENAI_CALLS = [
    chunk({"role": "assistant", "content": ""}),
    chunk({"reasoning_content": f"They want the weather. {ATTACK}"}),
    chunk({"content": "I look."}),
    *called(0, "get_weather", '{"city": "Oslo"}'),
    *called(1, ATTACK, json.dumps({"x": ATTACK})),
    chunk({}, "tool_calls"),
    {
        "choices": [],
        "usage": {"prompt_tokens": 9, "completion_tokens": 8, "completion_tokens_details": {"reasoning_tokens": 5}},
    },
]
OPENAI_END = [chunk({"role": "assistant", "content": ""}), chunk({"content": "It rains."}), chunk({}, "stop")]


def block(index: int, begin: dict[str, Any], *deltas: dict[str, Any]) -> list[dict[str, Any]]:
    """Anthropic's events of one content block."""
    return [
        {"type": "content_block_start", "index": index, "content_block": begin},
        *[{"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas],
        {"type": "content_block_stop", "index": index},
    ]


def tool_block(index: int, name: str, arguments: str) -> list[dict[str, Any]]:
    begin = {"type": "tool_use", "id": f"call_{index - 2}", "name": name, "input": {}}
    halves = (arguments[:5], arguments[5:])
    return block(index, begin, *[{"type": "input_json_delta", "partial_json": half} for half in halves])


def anthropic_end(reason: str) -> dict[str, Any]:
    usage = {"output_tokens": 8, "output_tokens_details": {"thinking_tokens": 5}}
    return {"type": "message_delta", "delta": {"stop_reason": reason}, "usage": usage}


ANTHROPIC_CALLS = [
    {"type": "message_start", "message": {"usage": {"input_tokens": 9, "output_tokens": 0}}},
    *block(0, {"type": "thinking"}, {"type": "thinking_delta", "thinking": f"They want the weather. {ATTACK}"}),
    *block(1, {"type": "text"}, {"type": "text_delta", "text": "I look."}),
    *tool_block(2, "get_weather", '{"city": "Oslo"}'),
    *tool_block(3, ATTACK, json.dumps({"x": ATTACK})),
    anthropic_end("tool_use"),
]
ANTHROPIC_END = [*block(0, {"type": "text"}, {"type": "text_delta", "text": "It rains."}), anthropic_end("end_turn")]

OPENAI_SENT = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": "I look.",
        "tool_calls": [
            {"id": "call_0", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}},
            {"id": "call_1", "type": "function", "function": {"name": ATTACK, "arguments": json.dumps({"x": ATTACK})}},
        ],
    },
    {"role": "tool", "tool_call_id": "call_0", "content": "rain"},
    {"role": "tool", "tool_call_id": "call_1", "content": "nothing"},
]
ANTHROPIC_SENT = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": [
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "call_0", "name": "get_weather", "input": {"city": "Oslo"}},
            {"type": "tool_use", "id": "call_1", "name": ATTACK, "input": {"x": ATTACK}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "call_0", "content": "rain"},
            {"type": "tool_result", "tool_use_id": "call_1", "content": "nothing"},
        ],
    },
]
