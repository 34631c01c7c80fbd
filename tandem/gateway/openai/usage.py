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
        "prompt_tokens_details": {"cached_tokens": sum(result.num_cached_tokens for result in prompts)},
    }


def finish_reason(reason: FinishReason | None) -> str | None:
    """NOTE: answers that ended otherwise are errors, and never get here."""
    return None if reason is None else reason.value
