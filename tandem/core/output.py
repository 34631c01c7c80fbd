"""Output of the engine for one request after a step."""

from dataclasses import dataclass

from tandem.core.pins import Pin
from tandem.core.types import FinishReason, TokenLogprobs


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Where a request's time went, in seconds of the engine's clock, and what the cache saved it.

    `num_cached_tokens` are prompt tokens whose KV was found, at first admission. `pins` are those that were granted, in
    the order they were asked for; one that could be granted in part has fewer tokens.
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

    @property
    def ttft_s(self) -> float | None:
        """Arrival to first token."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time between output tokens after the first."""
        if self.first_token_s is None or self.last_token_s is None or self.num_output_tokens < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (self.num_output_tokens - 1)


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """News of one choice of one request: only what is new since its last output.

    `text` may be shorter than the tokens say: half characters and possible stop strings are held back. `logprobs`
    matches `token_ids` when asked for. `prompt_logprobs` comes whole, with the first token; its first entry is None,
    since nothing predicts the first token. `stop_reason` is the stop string or stop token that matched, or the message
    of an error. `metrics` comes with the first token, when it is known what the cache saved, and with the last output.
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
