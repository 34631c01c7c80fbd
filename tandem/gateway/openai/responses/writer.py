"""Writes a response in OpenAI's format, streamed or whole.

The events of a stream are numbered and follow a strict order: created, in progress, each item added, filled and done,
and one last event: completed, incomplete or failed.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from tandem.core.types import FinishReason
from tandem.gateway.errors import Problem
from tandem.gateway.openai.responses.logprobs import TextLogprobs
from tandem.gateway.openai.responses.output import Event, Output
from tandem.gateway.parts import CallArguments, CallBegun, ContentText, Part, Thought, ToolCall, whole_parts
from tandem.gateway.request import ChoiceResult, ChoiceUpdate

_ERROR_CODES = {429: "rate_limit_exceeded", 400: "invalid_prompt", 413: "invalid_prompt"}
_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}


class ResponseEvents:
    """Numbers and formats the server-sent events of one response."""

    def __init__(self) -> None:
        self._number = 0

    def frame(self, kind: str, fields: Mapping[str, Any]) -> bytes:
        value = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps(value) + b"\n\n"

    def replace_last(self, kind: str, fields: Mapping[str, Any]) -> bytes:
        """Formats a replacement of the last event, under its number."""
        self._number -= 1
        return self.frame(kind, fields)

    def frames(self, events: Sequence[Event]) -> bytes:
        return b"".join(self.frame(*event) for event in events)


class ResponseWriter:
    """Writes one response: a `Writer`, whose methods `answer` calls (`gateway.dialect`).

    Attributes:
        draft: the response without output, with every field.
        final: the response once it has ended, else None.
    """

    def __init__(self, draft: Mapping[str, Any], result: ChoiceResult, logprobs: TextLogprobs | None) -> None:
        self.draft = draft
        self.final: dict[str, Any] | None = None
        self._result = result
        self._logprobs = logprobs
        self._pending: list[Any] = []
        self._events = ResponseEvents()
        self._output = Output(draft["id"])
        self._has_begun = False
        self._last = (b"", "")

    def chunk(self, batch: Sequence[ChoiceUpdate]) -> bytes:
        begun = b"" if self._has_begun else self._begin()
        return begun + b"".join(map(self._frames, batch))

    def end(self) -> bytes:
        late = self._output.add_logprobs(self._pending) + self._output.add_missing_message()
        before = self._events.frames([*late, *self._output.close(is_complete=self._is_complete)])
        self.final = self._ended()
        return self._last_words(before, f"response.{self.final['status']}")

    def failed(self, problem: Problem) -> bytes:
        """NOTE: sends both `error` and `response.failed`, since some clients know only one of them."""
        self.fail(problem)
        before = b"" if self._has_begun else self._begin()
        error = {"code": problem.code, "message": problem.message, "param": problem.param}
        return self._last_words(before + self._events.frame("error", error), "response.failed")

    def whole(self) -> bytes:
        for part in _parts(self._result):
            self._output.add(part, self._taken(self._result.logprobs) if isinstance(part, ContentText) else ())
        self._output.add_missing_message()
        self._output.close(is_complete=self._is_complete)
        self.final = self._ended()
        return self._last_words(b"", "")

    def fail(self, problem: Problem) -> None:
        """Ends the response as failed."""
        error = {"code": _ERROR_CODES.get(problem.status, "server_error"), "message": problem.message}
        self.final = {**self.draft, "status": "failed", "output": self._output.so_far, "error": error}

    def unstored(self) -> bytes:
        """The answer's last bytes again, corrected because the response could not be stored."""
        assert self.final is not None
        self.final["store"] = False
        before, kind = self._last
        if not kind:
            return orjson.dumps(self.final)
        return before + self._events.replace_last(kind, {"response": self.final})

    def _begin(self) -> bytes:
        self._has_begun = True
        return self._events.frames(_beginning(self.draft))

    def _last_words(self, before: bytes, kind: str) -> bytes:
        """The last bytes. `kind`: of the last event; empty for a body."""
        self._last = before, kind
        assert self.final is not None
        return before + self._events.frame(kind, {"response": self.final}) if kind else orjson.dumps(self.final)

    def _frames(self, update: ChoiceUpdate) -> bytes:
        self._pending += self._taken(update.logprobs or ())
        frames = b""
        for part in update.parts:
            logprobs: Sequence[Any] = ()
            if isinstance(part, ContentText):
                logprobs, self._pending = self._pending, []
            frames += self._events.frames(self._output.add(part, logprobs))
        return frames

    def _taken(self, entries: Sequence[Any]) -> list[Any]:
        return [] if self._logprobs is None else self._logprobs.add(entries)

    @property
    def _is_complete(self) -> bool:
        return self._result.finish_reason is FinishReason.STOP

    def _ended(self) -> dict[str, Any]:
        ended: dict[str, Any] = {"status": "completed", "completed_at": int(time.time())}
        if not self._is_complete:
            reason = _INCOMPLETE.get(str(self._result.finish_reason), "max_output_tokens")
            ended = {"status": "incomplete", "incomplete_details": {"reason": reason}}
        return {**self.draft, **ended, "output": self._output.items, "usage": usage_of(self._result)}


def usage_of(result: ChoiceResult) -> dict[str, Any]:
    """The `usage` of a response."""
    split = result.split
    return {
        "input_tokens": result.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": split.num_read, "cache_write_tokens": split.num_written},
        "output_tokens": result.num_output_tokens,
        "output_tokens_details": {"reasoning_tokens": result.num_reasoning_tokens},
        "total_tokens": result.num_prompt_tokens + result.num_output_tokens,
    }


def replayed(response: Mapping[str, Any], starting_after: int) -> bytes:
    """The stream of a stored response that has ended, after event `starting_after`; each text is in one piece."""
    draft = {
        **response,
        "status": "in_progress",
        "output": [],
        "usage": None,
        "error": None,
        "incomplete_details": None,
    }
    events = _beginning(draft)
    output = Output(str(response["id"]))
    for item in response["output"]:
        for part, logprobs in _stored_parts(item, len(output.items)):
            events += output.add(part, logprobs)
        events += output.add_missing_message()
        events += output.close(is_complete=item["status"] == "completed")
    events.append((f"response.{response['status']}", {"response": response}))
    numbered = ResponseEvents()
    frames = [numbered.frame(*event) for event in events]
    return b"".join(frames[max(0, starting_after + 1) :])


def _beginning(draft: Mapping[str, Any]) -> list[Event]:
    return [(f"response.{kind}", {"response": draft}) for kind in ("created", "in_progress")]


def _parts(result: ChoiceResult) -> list[Part]:
    """A whole answer as the parts of a stream."""
    parts: list[Part] = []
    for index, part in enumerate(whole_parts(result.parts)):
        if isinstance(part, ToolCall):
            parts += [CallBegun(index, part.call_id, part.name), CallArguments(index, part.arguments)]
        else:
            parts.append(part)
    return parts


def _stored_parts(item: Mapping[str, Any], index: int) -> list[tuple[Part, Sequence[Any]]]:
    if item["type"] == "function_call":
        begun = CallBegun(index, item["call_id"], item["name"])
        return [(begun, ()), (CallArguments(index, item["arguments"]), ())]
    if item["type"] == "reasoning":
        return [(Thought(part["text"]), ()) for part in item["content"]]
    return [(ContentText(part["text"]), part["logprobs"]) for part in item["content"]]
