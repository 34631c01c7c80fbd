"""`usage` and `finish_reason` as in OpenAI's completions and chat completions; `responses.writer` has its own.

In the usage a prompt counts once, however many answers it got.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from tandem.core.types import FinishReason
from tandem.gateway.request import ChoiceResult

_NOTHING: tuple[int, ...] = (0,) * 5


def usage_of(results: Sequence[ChoiceResult], num_per_prompt: int) -> dict[str, Any]:
    """`usage` of all results, `num_per_prompt` for each prompt; the first of these provides the prompt's figures."""
    return RunningUsage(results, num_per_prompt).value()


class RunningUsage:
    """`usage` of answers that are still growing.

    A stream may report it with every chunk and have hundreds of choices, so `recount` costs time only for the choices
    that changed.
    """

    def __init__(self, results: Sequence[ChoiceResult], num_per_prompt: int) -> None:
        self._results = results
        self._num_per_prompt = num_per_prompt
        self._counts = [_NOTHING] * len(results)
        self._sums = _NOTHING
        self.recount(range(len(results)))

    def recount(self, indexes: Iterable[int]) -> None:
        """Updates the usage after these choices have changed."""
        for index in indexes:
            before, now = self._counts[index], self._count(index)
            self._counts[index] = now
            self._sums = tuple(old + new - was for old, new, was in zip(self._sums, now, before, strict=True))

    def value(self) -> dict[str, Any]:
        num_prompt, num_read, num_written, num_output, num_reasoning = self._sums
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": num_read, "cache_write_tokens": num_written},
            "completion_tokens_details": {"reasoning_tokens": num_reasoning},
        }

    def _count(self, index: int) -> tuple[int, ...]:
        """Tokens of the prompt, and those of it read from and written to the cache; tokens of answer and thinking."""
        result = self._results[index]
        of_answer = result.num_output_tokens, result.num_reasoning_tokens
        if index % self._num_per_prompt:
            return (0, 0, 0, *of_answer)
        split = result.split
        return (result.num_prompt_tokens, split.num_read, split.num_written, *of_answer)


def finish_reason(reason: FinishReason | None, num_calls: int = 0) -> str | None:
    """OpenAI's `finish_reason`: `tool_calls` for a stop after tool calls, else the reason's name; None: still running.

    NOTE: answers that failed are reported as errors and never get here.

    Args:
        num_calls: tool calls that the answer made.
    """
    if reason is FinishReason.STOP and num_calls:
        return "tool_calls"
    return None if reason is None else reason.value
