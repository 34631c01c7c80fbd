"""A response before it has any output: every field that its request and the model determine. Pure."""

from collections.abc import Mapping
from typing import Any

from tandem.core.sampling_params import SamplingParams
from tandem.gateway.openai.responses.fields import ResponsesBody
from tandem.gateway.openai.responses.tools import echoed_choice, echoed_tools


def draft_of(
    asked: ResponsesBody, response_id: str, model: str, params: SamplingParams, created_s: int
) -> dict[str, Any]:
    """All fields of a response that is in progress and has no output."""
    options = asked.prompt_cache_options
    return {
        "id": response_id,
        "object": "response",
        "created_at": created_s,
        "completed_at": None,
        "status": "in_progress",
        "background": bool(asked.background),
        "store": asked.store is not False,
        "error": None,
        "incomplete_details": None,
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "max_tool_calls": None,
        "metadata": asked.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "previous_response_id": asked.previous_response_id,
        "prompt_cache_key": asked.prompt_cache_key,
        "prompt_cache_options": None if options is None else _cache_options(options.mode, options.ttl),
        "reasoning": {"effort": None if asked.reasoning is None else asked.reasoning.effort, "summary": None},
        "safety_identifier": asked.safety_identifier,
        "service_tier": "default",
        "temperature": params.temperature,
        "text": {"format": _text_format(asked), "verbosity": "medium"},
        "tool_choice": echoed_choice(asked.tool_choice),
        "tools": echoed_tools(asked.tools),
        "top_logprobs": asked.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": asked.truncation or "disabled",
        "usage": None,
        "user": asked.user,
    }


def _text_format(asked: ResponsesBody) -> Mapping[str, Any]:
    """The text format to repeat: only its validated members."""
    given = (None if asked.text is None else asked.text.format) or {"type": "text"}
    names = ("type", "name", "description", "schema", "strict") if given["type"] == "json_schema" else ("type",)
    return {name: given[name] for name in names if name in given}


def _cache_options(mode: str | None, ttl: str | None) -> dict[str, Any]:
    return {"mode": mode or "implicit", "ttl": ttl or "30m"}
