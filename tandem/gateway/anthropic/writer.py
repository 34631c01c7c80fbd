"""One answer in Anthropic's words, streamed or whole: one message with one block of text.

Streams: message_start, then the block's start, deltas and stop, then message_delta with why it ended, and message_stop.
"""

from collections.abc import Sequence
from typing import Any

import orjson

from tandem.core.types import FinishReason
from tandem.gateway.anthropic.frames import error_value, frame
from tandem.gateway.errors import Problem
from tandem.gateway.request import ChoiceResult, ChoiceUpdate


class MessageWriter:
    """Writes one message.

    Args:
        max_tokens: what the client allowed; 0: it wants no text, only a warm cache.
    """

    def __init__(self, message_id: str, model: str, result: ChoiceResult, max_tokens: int) -> None:
        self._fields = {"id": message_id, "type": "message", "role": "assistant", "model": model}
        self._result = result
        self._max_tokens = max_tokens
        self._has_begun = False

    def chunk(self, batch: Sequence[ChoiceUpdate]) -> bytes:
        text = "" if self._max_tokens == 0 else "".join(news.text for news in batch)
        delta = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}}
        return self._begin() + (frame(delta) if text else b"")

    def end(self) -> bytes:
        last = {"type": "message_delta", "delta": self._stop(), "usage": self._usage()}
        block = b"" if self._max_tokens == 0 else frame({"type": "content_block_stop", "index": 0})
        return self._begin() + block + frame(last) + frame({"type": "message_stop"})

    def failed(self, problem: Problem) -> bytes:
        return frame(error_value(problem))

    def whole(self) -> bytes:
        content = [] if self._max_tokens == 0 else [{"type": "text", "text": self._result.text, "citations": None}]
        return orjson.dumps({**self._fields, "content": content, **self._stop(), "usage": self._usage()})

    def _begin(self) -> bytes:
        if self._has_begun:
            return b""
        self._has_begun = True
        usage = self._usage() | {"output_tokens": 0}
        message: dict[str, Any] = {
            **self._fields,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        start = frame({"type": "message_start", "message": message})
        if self._max_tokens == 0:
            return start
        block = {"type": "text", "text": "", "citations": None}
        return start + frame({"type": "content_block_start", "index": 0, "content_block": block})

    def _stop(self) -> dict[str, Any]:
        result = self._result
        matched = result.stop_reason if isinstance(result.stop_reason, str) else None
        if matched is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": matched}
        if result.finish_reason is not FinishReason.LENGTH:
            return {"stop_reason": "end_turn", "stop_sequence": None}
        is_full = result.num_output_tokens < self._max_tokens
        return {"stop_reason": "model_context_window_exceeded" if is_full else "max_tokens", "stop_sequence": None}

    def _usage(self) -> dict[str, Any]:
        """Cached tokens are not among `input_tokens`; nothing is written by order, so nothing is billed as written."""
        result = self._result
        return {
            "input_tokens": result.num_prompt_tokens - result.num_cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": result.num_cached_tokens,
            "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
            "output_tokens": result.num_output_tokens if self._max_tokens else 0,
            "service_tier": "standard",
        }
