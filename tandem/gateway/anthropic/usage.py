"""Usage and stop reason of a message, in Anthropic's format. Pure.

Invariant: tokens read from the cache, written to it and plain input add up to the prompt.
"""

from typing import Any

from tandem.core.types import FinishReason
from tandem.gateway.request import ChoiceResult


def usage_of(result: ChoiceResult, *, is_expected: bool = False) -> dict[str, Any]:
    """The `usage` object. `is_expected`: an estimate before the worker has reported which pins it granted."""
    split = result.expected_split if is_expected else result.split
    return {
        "input_tokens": split.num_input,
        "cache_creation_input_tokens": split.num_written,
        "cache_read_input_tokens": split.num_read,
        "cache_creation": {
            "ephemeral_5m_input_tokens": split.num_written_short,
            "ephemeral_1h_input_tokens": split.num_written_long,
        },
        "output_tokens": result.num_output_tokens,
        "output_tokens_details": {"thinking_tokens": result.num_reasoning_tokens},
        "service_tier": "standard",
    }


def stop_of(result: ChoiceResult, max_tokens: int) -> dict[str, Any]:
    """`stop_reason` and its related fields. `max_tokens`: the limit that the client set."""
    reason, matched = _stop_reason(result, max_tokens), None
    if reason == "stop_sequence":
        matched = result.stop_reason
    details = {"type": "refusal", "category": None, "explanation": None} if reason == "refusal" else None
    return {"stop_reason": reason, "stop_sequence": matched, "stop_details": details}


def _stop_reason(result: ChoiceResult, max_tokens: int) -> str:
    if result.finish_reason is FinishReason.CONTENT_FILTER:
        return "refusal"
    if isinstance(result.stop_reason, str):
        return "stop_sequence"
    if result.finish_reason is FinishReason.LENGTH:
        is_full = result.num_output_tokens < max_tokens
        return "model_context_window_exceeded" if is_full else "max_tokens"
    return "tool_use" if result.num_calls else "end_turn"
