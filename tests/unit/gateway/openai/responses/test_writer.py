"""The writer alone: what each update becomes, however text is cut."""

from pathlib import Path
from typing import Any

import orjson

from tandem.core.types import FinishReason, TokenLogprobs
from tandem.gateway.errors import Problem
from tandem.gateway.openai.responses.ids import new_response_id
from tandem.gateway.openai.responses.logprobs import TextLogprobs
from tandem.gateway.openai.responses.writer import ResponseWriter
from tandem.gateway.parts import CallArguments, CallBegun, ContentText, Part, Thought
from tandem.gateway.request import ChoiceResult, ChoiceUpdate
from tandem.text.tokenizer import Tokenizer
from tests.helpers.tokenizers import write_byte_tokenizer
from tests.unit.gateway.openai.responses.machine import check_stream
from tests.unit.gateway.openai.responses.stage import frames_of


def draft() -> dict[str, Any]:
    return {"id": new_response_id(), "status": "in_progress", "output": [], "usage": None, "error": None, "store": True}


def test_each_token_is_scored_once_with_the_text_it_came_with_or_before(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_byte_tokenizer(tmp_path))
    result = ChoiceResult(3, keep=False)
    writer = ResponseWriter(draft(), result, TextLogprobs(tokenizer, 0, None))
    frames = b""
    for text, said in (("ab", "ab"), ("c", ""), ("de", "cde"), ("f", "f")):
        entries = tuple(
            TokenLogprobs(token_id, -0.5, 1, ()) for token_id in tokenizer.encode(text, add_special_tokens=False)
        )
        frames += writer.chunk([ChoiceUpdate(0, [ContentText(said)] if said else [], (), entries)])
    result.finish_reason = FinishReason.STOP
    events = frames_of((frames + writer.end()).decode())
    response = check_stream(events)
    deltas = [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
    assert ["".join(entry["token"] for entry in entries) for entries in deltas] == ["ab", "cde", "f"]
    assert "".join(entry["token"] for entry in response["output"][0]["content"][0]["logprobs"]) == "abcdef"


def test_scores_that_come_after_their_text_are_told_too(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_byte_tokenizer(tmp_path))
    result = ChoiceResult(3, keep=False, finish_reason=FinishReason.STOP)
    writer = ResponseWriter(draft(), result, TextLogprobs(tokenizer, 0, None))
    entries = tuple(
        TokenLogprobs(token_id, -0.5, 1, ()) for token_id in tokenizer.encode("ab", add_special_tokens=False)
    )
    frames = writer.chunk([ChoiceUpdate(0, [ContentText("ab")], ())])
    frames += writer.chunk([ChoiceUpdate(0, [], (), entries, finish_reason=FinishReason.STOP)])
    response = check_stream(frames_of((frames + writer.end()).decode()))
    (part,) = response["output"][0]["content"]
    assert (part["text"], "".join(entry["token"] for entry in part["logprobs"])) == ("ab", "ab")


def test_a_stream_that_breaks_before_its_first_piece_has_all_its_events() -> None:
    writer = ResponseWriter(draft(), ChoiceResult(3, keep=False), None)
    response = check_stream(frames_of(writer.failed(Problem(429, "rate_limit_error", "full", "wait")).decode()))
    assert response["error"] == {"code": "rate_limit_exceeded", "message": "wait"}
    assert writer.final == response


def test_a_whole_answer_has_the_items_of_its_stream() -> None:
    """The bug: all text came before the calls, so that of a text cut off the call before it was incomplete, which the
    next response then lacked.
    """
    begun = draft()
    parts: list[Part] = [Thought("t"), ContentText("a"), CallBegun(0, "call_1", "f"), CallArguments(0, "{}")]
    parts.append(ContentText("b"))
    update = ChoiceUpdate(0, parts, (), finish_reason=FinishReason.LENGTH)
    found = []
    for is_kept in (True, False):
        result = ChoiceResult(3, is_kept)
        result.add(update)
        writer = ResponseWriter(begun, result, None)
        assert writer.whole() if is_kept else writer.chunk([update]) + writer.end()
        assert writer.final is not None
        found.append(writer.final["output"])
    assert found[0] == found[1]
    assert [(item["type"], item["status"]) for item in found[0]] == [
        ("reasoning", "completed"),
        ("message", "completed"),
        ("function_call", "completed"),
        ("message", "incomplete"),
    ]


def test_the_last_words_are_said_again_without_the_store() -> None:
    for is_stream in (True, False):
        result = ChoiceResult(3, keep=True, finish_reason=FinishReason.STOP)
        writer = ResponseWriter(draft(), result, None)
        if is_stream:
            first = writer.chunk([ChoiceUpdate(0, [ContentText("hello")], ())])
            assert check_stream(frames_of((first + writer.end()).decode()))["store"] is True
            assert check_stream(frames_of((first + writer.unstored()).decode()))["store"] is False
        else:
            assert orjson.loads(writer.whole())["store"] is True
            assert orjson.loads(writer.unstored())["store"] is False
        assert writer.final is not None
        assert writer.final["store"] is False
