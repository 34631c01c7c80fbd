"""Common fields of OpenAI's answers: id, object, model and usage. Chat and plain completions share them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.core.machine import wall_s
from tandem.gateway.openai.fields import GenerateBody
from tandem.gateway.openai.frames import DONE, frame
from tandem.gateway.openai.usage import RunningUsage, usage_of
from tandem.gateway.request import ChoiceResult, ChoiceUpdate
from tandem.rpc.messages import ModelInfo

FINGERPRINT_CHARACTERS = 16


@dataclass(frozen=True, slots=True)
class Envelope:
    """Common fields of one answer, streamed or whole.

    Args:
        fields: fields of a whole answer and, except `object`, of each chunk.
        chunk_object: the `object` of each chunk.
        num_per_prompt: number of answers to each prompt.
        has_last_usage: a stream ends with its usage.
        running: usage for each chunk of a stream; None: not requested.
    """

    fields: Mapping[str, Any]
    chunk_object: str
    results: Sequence[ChoiceResult]
    num_per_prompt: int
    has_last_usage: bool
    running: RunningUsage | None

    @classmethod
    def of(
        cls,
        asked: GenerateBody,
        answer_id: str,
        kind: str,
        info: ModelInfo,
        results: Sequence[ChoiceResult],
        num_per_prompt: int,
    ) -> "Envelope":
        """Creates the envelope of an answer. `kind`: the `object` of a whole answer."""
        options = asked.stream_options
        fields = {
            "id": answer_id,
            "object": kind,
            "created": int(wall_s()),
            "model": info.name,
            "system_fingerprint": f"fp_{info.fingerprint[:FINGERPRINT_CHARACTERS]}",
        }
        # NOTE: completions stream under the name of the whole answer, chats under one of their own.
        chunk_object = "chat.completion.chunk" if kind == "chat.completion" else kind
        has_usage = options is not None and bool(options.include_usage)
        has_every = options is not None and has_usage and bool(options.continuous_usage_stats)
        running = RunningUsage(results, num_per_prompt) if has_every else None
        return cls(fields, chunk_object, results, num_per_prompt, has_usage, running)

    def note(self, batch: Sequence[ChoiceUpdate]) -> None:
        """Recounts the usage of updated results; call before their chunks are written."""
        if self.running is not None:
            self.running.recount({update.index for update in batch})

    def chunk(self, choices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """A chunk with these choices."""
        value = {**self.fields, "object": self.chunk_object, "choices": choices}
        if self.has_last_usage:
            value["usage"] = None if self.running is None else self.running.value()
        return value

    def last_frames(self) -> bytes:
        """The usage, if it was requested, and the end of the stream."""
        if not self.has_last_usage:
            return DONE
        return frame({**self.fields, "object": self.chunk_object, "choices": [], "usage": self._usage()}) + DONE

    def whole(self, choices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """A whole answer with these choices."""
        return {**self.fields, "choices": choices, "usage": self._usage()}

    def _usage(self) -> dict[str, Any]:
        return usage_of(self.results, self.num_per_prompt)
