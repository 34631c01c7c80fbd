"""One answer as frames and as a body: blocks, why it ended, and what it used."""

from typing import Any

import orjson
import pytest
from pydantic_core import from_json

from tandem.core.pins import Pin
from tandem.core.types import FinishReason
from tandem.gateway.anthropic.writer import MessageWriter
from tandem.gateway.parts import CallArguments, CallBegun, ContentText, Part, Thought
from tandem.gateway.prompt_split import LivePins
from tandem.gateway.request import ChoiceResult, ChoiceUpdate
from tests.unit.gateway.anthropic.talking import events


def streamed(*batches: list[Part], max_tokens: int = 9) -> list[tuple[str, dict[str, Any]]]:
    writer = MessageWriter("msg_1", "m", ChoiceResult(5, keep=False), max_tokens)
    frames = b"".join(writer.chunk([ChoiceUpdate(0, parts, ()) for parts in batch]) for batch in [[b] for b in batches])
    return events(frames + writer.end())


def blocks(told: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    """Content blocks of a client that only appends deltas."""
    found: list[Any] = []
    for name, value in told:
        if name == "content_block_start":
            found.append([value["content_block"]["type"], ""])
        elif name == "content_block_delta" and value["delta"]["type"] != "signature_delta":
            found[value["index"]][1] += next(text for key, text in value["delta"].items() if key != "type")
    return found


def test_parts_open_and_close_blocks() -> None:
    last = CallArguments(1, "{}"), ContentText(" ")
    told = streamed(
        [Thought("a")],
        [Thought("b"), ContentText("\n\n")],
        [ContentText("x"), CallBegun(0, "call_1", "f"), CallArguments(0, "{")],
        [CallArguments(0, "}"), ContentText("\n"), CallBegun(1, "call_2", "g"), *last],
        [ContentText("end")],
    )
    called = ["tool_use", "{}"]
    assert blocks(told) == [["thinking", "ab"], ["text", "\n\nx"], called, called, ["text", " end"]]
    ids = [value["content_block"]["id"] for name, value in told if value.get("content_block", {}).get("id")]
    assert ids == ["toolu_1", "toolu_2"]
    assert [value["index"] for name, value in told if name == "content_block_stop"] == [0, 1, 2, 3, 4]


def test_an_answer_that_says_nothing_is_one_empty_text() -> None:
    assert blocks(streamed([])) == [["text", ""]]
    assert blocks(streamed([ContentText("\n")])) == [["text", "\n"]]
    assert blocks(streamed([ContentText("x")], max_tokens=0)) == []


def test_white_space_beside_a_call_is_no_block() -> None:
    call = CallBegun(0, "call_1", "f"), CallArguments(0, "{}")
    result = ChoiceResult(5, True, parts=[ContentText("\n"), *call, ContentText("\n")])
    assert [block["type"] for block in whole(result)["content"]] == ["tool_use"]
    assert blocks(streamed([ContentText("\n"), *call, ContentText("\n")])) == [["tool_use", "{}"]]


def test_a_whole_answer_has_the_blocks_of_its_stream() -> None:
    """The bug: all text came before the calls."""
    calls: list[list[Part]] = [
        [CallBegun(index, f"call_{index}", "f"), CallArguments(index, "{}")] for index in range(2)
    ]
    parts: list[Part] = [Thought("t"), ContentText("a"), *calls[0], ContentText("b"), *calls[1]]
    content = whole(ChoiceResult(5, True, parts=parts))["content"]
    shown = [[block["type"], block.get("thinking", block.get("text", "{}"))] for block in content]
    assert shown == blocks(streamed(parts))
    assert shown == [["thinking", "t"], ["text", "a"], ["tool_use", "{}"], ["text", "b"], ["tool_use", "{}"]]


def whole(result: ChoiceResult, max_tokens: int = 9) -> dict[str, Any]:
    read: dict[str, Any] = orjson.loads(MessageWriter("msg_1", "m", result, max_tokens).whole())
    return read


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"finish_reason": FinishReason.STOP}, "end_turn"),
        ({"finish_reason": FinishReason.STOP, "stop_reason": 7}, "end_turn"),
        ({"finish_reason": FinishReason.STOP, "num_calls": 1}, "tool_use"),
        ({"finish_reason": FinishReason.STOP, "stop_reason": "END", "num_calls": 1}, "stop_sequence"),
        ({"finish_reason": FinishReason.LENGTH, "num_output_tokens": 9, "num_calls": 1}, "max_tokens"),
        ({"finish_reason": FinishReason.LENGTH, "num_output_tokens": 8}, "model_context_window_exceeded"),
        ({"finish_reason": FinishReason.CONTENT_FILTER}, "refusal"),
    ],
)
def test_why_an_answer_ended(more: dict[str, Any], reason: str) -> None:
    message = whole(ChoiceResult(5, True, **more))
    assert message["stop_reason"] == reason
    assert message["stop_sequence"] == ("END" if reason == "stop_sequence" else None)
    assert (message["stop_details"] or {}).get("type") == ("refusal" if reason == "refusal" else None)


def test_usage_is_split_and_adds_up() -> None:
    pins = (Pin(64, 3600.0), Pin(96, 300.0))
    result = ChoiceResult(100, True, pins=pins, live=LivePins(16, 16), num_cached_tokens=32, num_output_tokens=7)
    assert whole(result)["usage"]["cache_creation_input_tokens"] == 0
    (_, start), *_ = events(MessageWriter("msg_1", "m", result, 9).chunk([]))
    result.granted = pins
    usage = whole(result)["usage"]
    assert start["message"]["usage"] == usage | {"output_tokens": 0}
    split = usage["cache_creation"]
    assert split == {"ephemeral_5m_input_tokens": 32, "ephemeral_1h_input_tokens": 48}
    assert usage["cache_creation_input_tokens"] == sum(split.values())
    assert usage["cache_read_input_tokens"] == 16
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"] == 100
    assert (usage["output_tokens"], usage["output_tokens_details"]) == (7, {"thinking_tokens": 0})


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ('{"a": 1}', {"a": 1}),
        ("", {}),
        ('{"a": 1, "b": [2, ', {"a": 1, "b": [2]}),
        ('{"a": "é", "b": NaN}', {"arguments": '{"a": "é", "b": NaN}'}),
        ('{"a": 1e999, "b', {"arguments": '{"a": 1e999, "b'}),
        ("{a: 1}", {"arguments": "{a: 1}"}),
        ("[1]", {"arguments": "[1]"}),
        (" ", {}),
    ],
)
def test_arguments_are_an_object_whatever_a_model_wrote(arguments: str, wanted: dict[str, Any]) -> None:
    result = ChoiceResult(5, True, parts=[CallBegun(0, "call_1", "f"), CallArguments(0, arguments)])
    (block,) = whole(result)["content"]
    assert block == {"type": "tool_use", "id": "toolu_1", "name": "f", "input": wanted}


@pytest.mark.parametrize(
    "arguments",
    ['{"a": [1, "é"]}', "", " ", "{", " { ", "{}", '{"a": 1, "b": "x', "(a='\"é\\n', b=", "{'a': 1}", "{a: 1}", "[1]"],
)
def test_streamed_arguments_are_an_object_too(arguments: str) -> None:
    """The bug: clients of a stream failed at arguments that are no JSON, as those of a Python call that was cut off."""
    result = ChoiceResult(5, True, parts=[CallBegun(0, "call_1", "f"), CallArguments(0, arguments)])
    wanted = whole(result)["content"][0]["input"]
    for pieces in ([arguments], list(arguments)):
        told = streamed(
            [CallBegun(0, "call_1", "f"), *(CallArguments(0, piece) for piece in pieces)], [ContentText("x")]
        )
        (_, text), _ = blocks(told)
        for length in range(1, len(text) + 1):
            from_json(text[:length], allow_partial=True)
        assert from_json(text or "{}", allow_partial=True) == wanted
