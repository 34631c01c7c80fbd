"""Output of the engine for a request after a step: new tokens and text, and the request's metrics."""

from dataclasses import dataclass

from tandem.core.draft_counts import DraftCounts
from tandem.core.pins import Pin
from tandem.core.types import FinishReason, TokenLogprobs


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times of a request, in seconds of the engine's clock, and its use of the prefix cache.

    Args:
        num_output_tokens: without those that other workers generated before this one continued the request.
        num_cached_tokens: prompt tokens whose KV was cached at first admission.
        pins: granted pins in the requested order; a pin granted in part has fewer tokens.
        drafts: of its decode steps in this worker, with the seconds that they saved it; None = there were none.
    """

    arrival_s: float
    first_scheduled_s: float | None
    first_token_s: float | None
    last_token_s: float | None
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    pins: tuple[Pin, ...] = ()
    drafts: DraftCounts | None = None

    @property
    def ttft_s(self) -> float | None:
        """Time from arrival to the first token."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time between output tokens after the first."""
        if self.first_token_s is None or self.last_token_s is None or self.num_output_tokens < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (self.num_output_tokens - 1)


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """Update of one choice of one request: only the part that is new since its last output.

    Args:
        text: may be shorter than the tokens' text, since incomplete characters and possible stop strings are held back.
        logprobs: one entry per token id, if requested.
        prompt_logprobs: complete, with the first token; its first entry is None, since nothing predicts the first
            token.
        stop_reason: the stop string or stop token that matched, or the message of an error.
        metrics: with the first token, when the use of the cache is known, and with the last output.
    """

    request_id: str
    index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    metrics: RequestMetrics | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None
