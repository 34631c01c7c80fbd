"""Attributes of a request's span, by OpenTelemetry's names for generative models.

Prompts and outputs are not included: user content stays out of traces.
"""

from collections.abc import Mapping, Sequence

from tandem.core.sampling_params import SamplingParams
from tandem.telemetry.tracing import Attribute

_PARAMS = {
    "max_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "stop": "gen_ai.request.stop_sequences",
}


def request_attributes(operation: str, model: str, params: SamplingParams) -> dict[str, Attribute]:
    """Attributes known when a request arrives. `operation`: "chat" or "text_completion"."""
    parameters: Mapping[str, Attribute | None] = {key: getattr(params, name) for name, key in _PARAMS.items()}
    attributes: dict[str, Attribute] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "tandem",
        "gen_ai.request.model": model,
    }
    attributes |= {key: value for key, value in parameters.items() if value is not None and value != ()}
    if params.seed is not None and params.seed < 2**63:  # NOTE: spans carry signed 64-bit integers, seeds go beyond
        attributes["gen_ai.request.seed"] = params.seed
    return attributes if params.n == 1 else attributes | {"gen_ai.request.choice.count": params.n}


def response_attributes(
    request_id: str,
    finish_reasons: Sequence[str],
    num_prompt_tokens: int,
    num_output_tokens: int,
    num_cached_tokens: int = 0,
) -> dict[str, Attribute]:
    """Attributes known when a request has ended: one finish reason per choice, tokens of all choices."""
    return {
        "gen_ai.response.id": request_id,
        "gen_ai.response.finish_reasons": list(finish_reasons),
        "gen_ai.usage.input_tokens": num_prompt_tokens,
        "gen_ai.usage.output_tokens": num_output_tokens,
        "gen_ai.usage.cache_read.input_tokens": num_cached_tokens,
    }
