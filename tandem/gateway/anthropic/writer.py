"""Writes an answer in Anthropic's format, streamed or whole: one message of thinking, text and tool_use blocks.

Streams: message_start, each block's start, deltas and stop, then message_delta with the stop reason, and message_stop.
Invariant: one block is open at a time, and blocks are numbered without gaps.
"""

from collections.abc import Sequence
from typing import Any

import orjson

from tandem.gateway.anthropic.call_input import InputStream, whole_input
from tandem.gateway.anthropic.frames import error_value, frame
from tandem.gateway.anthropic.thinking import Signature
from tandem.gateway.anthropic.turns import OUR_IDS
from tandem.gateway.anthropic.usage import stop_of, usage_of
from tandem.gateway.errors import Problem
from tandem.gateway.parts import (
    CallArguments,
    CallBegun,
    ContentText,
    Part,
    Thought,
    ToolCall,
    WholePart,
    whole_parts,
)
from tandem.gateway.request import ChoiceResult, ChoiceUpdate


class MessageWriter:
    """Writes one message: a `Writer`, whose methods `answer` calls (`gateway.dialect`).

    Args:
        max_tokens: the limit that the client set; 0: no output is returned, only the cache is filled.
        shows_thinking: False: thinking blocks come without their text.
    """

    def __init__(
        self, message_id: str, model: str, result: ChoiceResult, max_tokens: int, *, shows_thinking: bool = True
    ) -> None:
        self._fields = {"id": message_id, "type": "message", "role": "assistant", "model": model}
        self._result = result
        self._max_tokens = max_tokens
        self._shows_thinking = shows_thinking
        self._has_begun = False
        self._blocks = _BlockStream(shows_thinking)

    def chunk(self, batch: Sequence[ChoiceUpdate]) -> bytes:
        start = self._begin()
        if self._max_tokens == 0:
            return start
        return start + b"".join(self._blocks.part(part) for update in batch for part in update.parts)

    def end(self) -> bytes:
        start = self._begin()
        blocks = b"" if self._max_tokens == 0 else self._blocks.end()
        stop, usage = stop_of(self._result, self._max_tokens), usage_of(self._result)
        last = {"type": "message_delta", "delta": stop, "usage": usage}
        return start + blocks + frame(last) + frame({"type": "message_stop"})

    def failed(self, problem: Problem) -> bytes:
        return frame(error_value(problem))

    def whole(self) -> bytes:
        content = [] if self._max_tokens == 0 else self._content()
        stop = stop_of(self._result, self._max_tokens)
        return orjson.dumps({**self._fields, "content": content, **stop, "usage": usage_of(self._result)})

    def _begin(self) -> bytes:
        if self._has_begun:
            return b""
        self._has_begun = True
        empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None, "stop_details": None}
        usage = usage_of(self._result, is_expected=True) | {"output_tokens": 0}
        message = {**self._fields, **empty, "usage": usage}
        return frame({"type": "message_start", "message": message})

    def _content(self) -> list[dict[str, Any]]:
        """The blocks, in order. White space beside other blocks is no block; an answer without any is one text."""
        blocks = [self._block(part) for part in whole_parts(self._result.parts) if not _is_blank(part)]
        return blocks or [{"type": "text", "text": self._result.text, "citations": None}]

    def _block(self, part: WholePart) -> dict[str, Any]:
        match part:
            case Thought():
                shown = part.text if self._shows_thinking else ""
                return {"type": "thinking", "thinking": shown, "signature": Signature(part.text).value}
            case ContentText():
                return {"type": "text", "text": part.text, "citations": None}
            case ToolCall():
                own = {"id": call_id(part.call_id), "name": part.name}
                return {"type": "tool_use", **own, "input": whole_input(part.arguments)}


class _BlockStream:
    """Formats parts as events of content blocks. Leading white space of a text block is held until text follows."""

    def __init__(self, shows_thinking: bool) -> None:
        self._shows_thinking = shows_thinking
        self._next_index = 0
        self._kind: str | None = None  # of the open block
        self._blank = ""
        self._signature = Signature()
        self._input = InputStream()

    def part(self, part: Part) -> bytes:
        match part:
            case Thought():
                return self._think(part.text)
            case ContentText():
                return self._say(part.text)
            case CallBegun():
                block = {"type": "tool_use", "id": call_id(part.call_id), "name": part.name, "input": {}}
                opened, self._input = self._open("tool_use", block), InputStream()
                return opened + self._input_delta("")
            case CallArguments():
                text = self._input.add(part.text)
                return self._input_delta(text) if text else b""

    def end(self) -> bytes:
        """Closes the open block; an answer without any block gets one empty text block."""
        if self._next_index:
            return self._close()
        blank = self._blank
        opened = self._open("text", {"type": "text", "text": "", "citations": None})
        delta = self._delta({"type": "text_delta", "text": blank}) if blank else b""
        return opened + delta + self._close()

    def _think(self, text: str) -> bytes:
        begun = b""
        if self._kind != "thinking":
            begun = self._open("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            self._signature = Signature()
        self._signature.add(text)
        return begun + self._delta({"type": "thinking_delta", "thinking": text}) if self._shows_thinking else begun

    def _say(self, text: str) -> bytes:
        begun = b""
        if self._kind != "text":
            text = self._blank + text
            if not text.strip():
                self._blank = text
                return b""
            begun = self._open("text", {"type": "text", "text": "", "citations": None})
        return begun + self._delta({"type": "text_delta", "text": text})

    def _open(self, kind: str, block: dict[str, Any]) -> bytes:
        closed = self._close()
        self._kind, self._blank = kind, ""
        self._next_index += 1
        return closed + frame({"type": "content_block_start", "index": self._next_index - 1, "content_block": block})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return frame({"type": "content_block_delta", "index": self._next_index - 1, "delta": delta})

    def _input_delta(self, text: str) -> bytes:
        return self._delta({"type": "input_json_delta", "partial_json": text})

    def _close(self) -> bytes:
        kind, self._kind = self._kind, None
        if kind is None:
            return b""
        last = b""
        if kind == "thinking":
            last = self._delta({"type": "signature_delta", "signature": self._signature.value})
        elif kind == "tool_use" and (rest := self._input.end()):
            last = self._input_delta(rest)
        return last + frame({"type": "content_block_stop", "index": self._next_index - 1})


def _is_blank(part: WholePart) -> bool:
    return isinstance(part, ContentText) and not part.text.strip()


def call_id(own: str) -> str:
    """The id of a tool call with this API's prefix."""
    return f"{OUR_IDS}{own.removeprefix('call_')}"
