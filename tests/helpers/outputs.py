"""Outputs of a choice as a worker sends them, for tests of the gateway's handling of them."""

from tandem.core.output import RequestMetrics, RequestOutput
from tandem.core.pins import Pin
from tandem.core.types import FinishReason, TokenLogprobs


def output_of(
    index: int,
    token_ids: tuple[int, ...],
    text: str,
    logprobs: tuple[TokenLogprobs, ...] | None = None,
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None,
    finish_reason: FinishReason | None = None,
    stop_reason: int | str | None = None,
    *,
    num_cached_tokens: int = 0,
    pins: tuple[Pin, ...] | None = None,
) -> RequestOutput:
    """`pins` of None: without metrics, so nothing is said of the cache either."""
    metrics = None
    if pins is not None:
        metrics = RequestMetrics(0.0, None, None, None, 0, 0, num_cached_tokens, 0, pins)
    return RequestOutput("r", index, token_ids, text, logprobs, prompt_logprobs, finish_reason, stop_reason, metrics)
