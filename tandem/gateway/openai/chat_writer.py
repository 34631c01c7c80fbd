"""Writes a chat answer in OpenAI's format, streamed or whole.

Streams: the first chunk of a choice has its role and empty content; thinking, text and calls follow as they come, the
id and name of a call once; the last chunk has the finish reason; usage comes in a chunk without choices. Choices begin
in the order of their index, because clients append each new one to a list and find it there by its index.
"""

from collections.abc import Sequence
from typing import Any

import orjson

from tandem.core.types import TokenLogprobs
from tandem.gateway.errors import Problem
from tandem.gateway.openai.envelope import Envelope
from tandem.gateway.openai.fields import ChatBody
from tandem.gateway.openai.frames import error_frames, frame
from tandem.gateway.openai.logprobs import chat_logprobs, prompt_logprobs
from tandem.gateway.openai.usage import finish_reason
from tandem.gateway.parts import CallArguments, CallBegun, ContentText, Part, Thought, ToolCall
from tandem.gateway.request import ChoiceResult, ChoiceUpdate
from tandem.text.tokenizer import Tokenizer


class ChatWriter:
    """Writes one chat answer: a `Writer`, whose methods `answer` calls (`gateway.dialect`)."""

    def __init__(
        self, envelope: Envelope, asked: ChatBody, tokenizer: Tokenizer, prompt_token_ids: Sequence[int]
    ) -> None:
        self._envelope = envelope
        self._tokenizer = tokenizer
        self._num_top = (asked.top_logprobs or 0) if asked.logprobs else None
        self._prompt_token_ids = list(prompt_token_ids) if asked.return_token_ids else None
        self._num_begun = 0

    def chunk(self, batch: Sequence[ChoiceUpdate]) -> bytes:
        self._envelope.note(batch)
        return b"".join(map(self._frames, batch))

    def end(self) -> bytes:
        return self._envelope.last_frames()

    def failed(self, problem: Problem) -> bytes:
        return error_frames(problem)

    def whole(self) -> bytes:
        results = self._envelope.results
        value = self._envelope.whole([self._choice(index, result) for index, result in enumerate(results)])
        if results[0].prompt_logprobs is not None:
            value["prompt_logprobs"] = prompt_logprobs(self._tokenizer, results[0].prompt_logprobs)
        if self._prompt_token_ids is not None:
            value["prompt_token_ids"] = self._prompt_token_ids
        return orjson.dumps(value)

    def _choice(self, index: int, result: ChoiceResult) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "message": _message(result),
            "logprobs": None if self._num_top is None else self._logprobs(result.logprobs),
            "finish_reason": finish_reason(result.finish_reason, result.num_calls),
            "stop_reason": result.stop_reason,
        }
        return choice if self._prompt_token_ids is None else choice | {"token_ids": result.token_ids}

    def _frames(self, update: ChoiceUpdate) -> bytes:
        is_worth_it = update.parts or update.finish_reason or (update.token_ids and self._shows_tokens)
        text = self._frame(update) if is_worth_it else b""
        if update.index < self._num_begun:
            return text
        beginnings = b"".join(map(self._beginning, range(self._num_begun, update.index + 1)))
        self._num_begun = update.index + 1
        return beginnings + text

    def _beginning(self, index: int) -> bytes:
        first: dict[str, Any] = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
        value = self._envelope.chunk([first | {"finish_reason": None}])
        if self._prompt_token_ids is not None:
            value["prompt_token_ids"] = self._prompt_token_ids
        return frame(value)

    @property
    def _shows_tokens(self) -> bool:
        return self._num_top is not None or self._prompt_token_ids is not None

    def _frame(self, update: ChoiceUpdate) -> bytes:
        delta = _delta(update.parts)
        num_calls = self._envelope.results[update.index].num_calls
        choice: dict[str, Any] = {
            "index": update.index,
            "delta": {"content": ""} if self._shows_tokens and not delta else delta,
            "logprobs": None if self._num_top is None else self._logprobs(update.logprobs or ()),
            "finish_reason": finish_reason(update.finish_reason, num_calls),
        }
        if update.finish_reason is not None:
            choice["stop_reason"] = update.stop_reason
        if self._prompt_token_ids is not None:
            choice["token_ids"] = update.token_ids
        return frame(self._envelope.chunk([choice]))

    def _logprobs(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        return chat_logprobs(self._tokenizer, entries, self._num_top or 0)


def _delta(parts: Sequence[Part]) -> dict[str, Any]:
    """The `delta` object for these parts; clients concatenate each field separately."""
    delta: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for part in parts:
        match part:
            case ContentText():
                delta["content"] = delta.get("content", "") + part.text
            case Thought():
                delta["reasoning"] = delta["reasoning_content"] = delta.get("reasoning", "") + part.text
            case CallBegun():
                function = {"name": part.name, "arguments": ""}
                calls[part.index] = {"index": part.index, "id": part.call_id, "type": "function", "function": function}
            case CallArguments():
                call = calls.setdefault(part.index, {"index": part.index, "function": {"arguments": ""}})
                call["function"]["arguments"] += part.text
    if calls:
        delta["tool_calls"] = [calls[index] for index in sorted(calls)]
    return delta


def _message(result: ChoiceResult) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": result.text, "refusal": None}
    thought, calls = result.thought, result.calls
    if result.reasoning is not None or thought:
        message["reasoning"] = message["reasoning_content"] = thought or None
    if calls:
        message["content"] = result.text or None
        message["tool_calls"] = [_call(call) for call in calls]
    return message


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
