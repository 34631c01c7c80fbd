"""What surrounds the choices of an OpenAI answer, streamed or whole: id, object, model, usage. Same in both APIs."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.gateway.openai.fields import GenerateBody
from tandem.gateway.openai.frames import DONE, frame
from tandem.gateway.openai.usage import usage_of
from tandem.gateway.request import ChoiceResult
from tandem.rpc.messages import ModelInfo

FINGERPRINT_CHARACTERS = 16


@dataclass(frozen=True, slots=True)
class Envelope:
    """One answer's fixed fields.

    Args:
        fields: of a whole answer and, but for `object`, of each chunk.
        num_per_prompt: answers each prompt gets.
        has_last_usage, has_every_usage: where a stream says what it used.
    """

    fields: Mapping[str, Any]
    chunk_object: str
    results: Sequence[ChoiceResult]
    num_per_prompt: int
    has_last_usage: bool
    has_every_usage: bool

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
        options = asked.stream_options
        fields = {
            "id": answer_id,
            "object": kind,
            "created": int(time.time()),
            "model": info.name,
            "system_fingerprint": f"fp_{info.fingerprint[:FINGERPRINT_CHARACTERS]}",
        }
        # NOTE: completions stream under the name of the whole answer, chats under one of their own.
        chunk_object = "chat.completion.chunk" if kind == "chat.completion" else kind
        has_usage = options is not None and bool(options.include_usage)
        every = options is not None and bool(options.continuous_usage_stats)
        return cls(fields, chunk_object, results, num_per_prompt, has_usage, has_usage and every)

    def chunk(self, choices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        value = {**self.fields, "object": self.chunk_object, "choices": choices}
        if self.has_last_usage:
            value["usage"] = self._usage() if self.has_every_usage else None
        return value

    def last_frames(self) -> bytes:
        """The usage, if it was asked for, and the end."""
        if not self.has_last_usage:
            return DONE
        return frame({**self.fields, "object": self.chunk_object, "choices": [], "usage": self._usage()}) + DONE

    def whole(self, choices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {**self.fields, "choices": choices, "usage": self._usage()}

    def _usage(self) -> dict[str, Any]:
        return usage_of(self.results, self.num_per_prompt)
