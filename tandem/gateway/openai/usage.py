"""What an answer used, as OpenAI counts it: a prompt once however many answers it got. Pure."""

from collections.abc import Sequence
from typing import Any

from tandem.core.types import FinishReason
from tandem.gateway.request import ChoiceResult


def usage_of(results: Sequence[ChoiceResult], num_per_prompt: int) -> dict[str, Any]:
    """`usage`; the first of a prompt's `num_per_prompt` answers says what the cache saved it."""
    prompts = results[::num_per_prompt]
    num_prompt = sum(result.num_prompt_tokens for result in prompts)
    num_output = sum(result.num_output_tokens for result in results)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {
            "cached_tokens": sum(result.split.num_read for result in prompts),
            "cache_write_tokens": sum(result.split.num_written for result in prompts),
        },
        "completion_tokens_details": {"reasoning_tokens": sum(result.num_reasoning_tokens for result in results)},
    }


def finish_reason(reason: FinishReason | None, num_calls: int = 0) -> str | None:
    """`num_calls`: tool calls the answer made. NOTE: answers that ended otherwise are errors, and never get here."""
    if reason is FinishReason.STOP and num_calls:
        return "tool_calls"
    return None if reason is None else reason.value
