"""A request in the form that all APIs share: prompts as token ids, the updates of its answers, and their results.

Plain values. Dialects create them; `serving` and `journey` serve them.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tandem.core.output import RequestMetrics, RequestOutput
from tandem.core.pins import Pin
from tandem.core.reasoning import ReasoningState
from tandem.core.sampling_params import SamplingParams
from tandem.core.scope import CacheScope
from tandem.core.timeline import Stage
from tandem.core.types import FinishReason, TokenLogprobs
from tandem.gateway.parts import (
    AnswerParser,
    CallBegun,
    ContentText,
    Part,
    PlainParser,
    Thought,
    ToolCall,
    whole_parts,
)
from tandem.gateway.prompt_split import LivePins, PromptSplit, split_prompt


@dataclass(frozen=True, slots=True)
class ChoiceRequest:
    """Request for one answer to one prompt.

    Args:
        prompt_token_ids: packed; not to be modified, since all choices of the prompt have the same object.
        params: `n` is 1 and `seed` is set, so that any worker draws the same tokens.
    """

    index: int
    request_id: str
    prompt_token_ids: "array[int]"
    params: SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeRequest:
    """A client's request as the serving core takes it: one or more choices.

    Args:
        choices: answers wanted, in the order of their index.
        local_prefill: the decode worker must compute the prompt itself, as prompt logprobs require.
        num_expected_output: estimated output tokens of an answer.
        scope: requests of equal scope share cached state.
        priority: lower is more urgent.
        session_id: the client's id of its conversation, by which routers choose the same workers; None = not given.
        pins: prefixes to keep of the prompt, which all choices share.
    """

    request_id: str
    model: str
    choices: tuple[ChoiceRequest, ...]
    num_expected_output: int
    scope: CacheScope
    priority: int = 0
    session_id: str | None = None
    pins: tuple[Pin, ...] = ()
    local_prefill: bool = False


@dataclass(frozen=True, slots=True)
class ChoiceUpdate:
    """Part of a `RequestOutput` that a client may see: its text parsed into `parts`, and no more tokens than a
    moderator has passed.
    """

    index: int
    parts: Sequence[Part]
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def text(self) -> str:
        """Text for the user, without thinking and calls."""
        return "".join(part.text for part in self.parts if isinstance(part, ContentText))


@dataclass(slots=True)
class ChoiceResult:
    """Accumulated result of one choice.

    Args:
        keep: False: only counts are kept, which suffices for a stream.
        parser: splits its text into parts.
        reasoning: counts its thinking tokens; None = the model does not think.
        pins, granted: pins requested, and pins the worker granted, once it has reported them.
        live: prefixes that earlier requests' pins keep.
        is_prompt_only: only the prompt is wanted; the one token generated with it is dropped.
        is_computed: the prompt was computed, since a token has arrived.
        parts: the answer's parts in order, where it is kept.
    """

    num_prompt_tokens: int
    keep: bool
    parser: AnswerParser = field(default_factory=PlainParser)
    reasoning: ReasoningState | None = None
    pins: tuple[Pin, ...] = ()
    granted: tuple[Pin, ...] | None = None
    live: LivePins = field(default_factory=LivePins)
    is_prompt_only: bool = False
    is_computed: bool = False
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    num_calls: int = 0
    parts: list[Part] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, ContentText))

    @property
    def thought(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, Thought))

    @property
    def calls(self) -> list[ToolCall]:
        return [part for part in whole_parts(self.parts) if isinstance(part, ToolCall)]

    @property
    def split(self) -> PromptSplit:
        """Billing classes of the prompt's tokens."""
        return split_prompt(self.num_prompt_tokens, self.num_cached_tokens, self.granted or (), self.live)

    @property
    def expected_split(self) -> PromptSplit:
        """`split`; before the worker's report, an estimate: earlier pins are cached, all requested pins granted."""
        if self.granted is not None:
            return self.split
        num_cached = min(self.num_prompt_tokens, self.live.num_any)
        return split_prompt(self.num_prompt_tokens, num_cached, self.pins, self.live)

    @property
    def num_reasoning_tokens(self) -> int:
        return 0 if self.reasoning is None else self.reasoning.num_tokens

    def read(self, output: RequestOutput) -> ChoiceUpdate:
        """Counts an update and returns it parsed."""
        self.is_computed |= bool(output.token_ids)
        if self.is_prompt_only:
            output = _of_prompt(output)
        parts = list(self.parser.feed(output.text))
        if output.finish_reason is not None:
            parts += self.parser.finish()
        self._count(output)
        return ChoiceUpdate(
            output.index,
            parts,
            output.token_ids,
            output.logprobs,
            output.prompt_logprobs,
            output.finish_reason,
            output.stop_reason,
        )

    def add(self, update: ChoiceUpdate) -> None:
        """Adds the part of an update that the client may see."""
        self.num_calls += sum(isinstance(part, CallBegun) for part in update.parts)
        self.finish_reason = update.finish_reason or self.finish_reason
        if self.keep:
            self._keep(update)

    def _count(self, output: RequestOutput) -> None:
        self.num_output_tokens += len(output.token_ids)
        if output.metrics is not None:
            self.num_cached_tokens = max(self.num_cached_tokens, output.metrics.num_cached_tokens)
            self.granted = output.metrics.pins
        self.stop_reason = output.stop_reason if output.stop_reason is not None else self.stop_reason
        if self.reasoning is not None:
            for token_id in output.token_ids:
                self.reasoning.observe(token_id)

    def _keep(self, update: ChoiceUpdate) -> None:
        self.parts += update.parts
        self.token_ids += update.token_ids
        self.logprobs += update.logprobs or ()
        self.prompt_logprobs = self.prompt_logprobs or update.prompt_logprobs


def _of_prompt(output: RequestOutput) -> RequestOutput:
    """`output` without generated output; its finish reason `stop` becomes `length`."""
    reason = FinishReason.LENGTH if output.finish_reason is FinishReason.STOP else output.finish_reason
    return replace(output, token_ids=(), text="", logprobs=None, finish_reason=reason, stop_reason=None)


@dataclass(frozen=True, slots=True)
class ChoiceEnd:
    """End of a choice, for metrics and the request's history.

    Args:
        reason: stop, length, abort or error.
        error: message of the error that ended it early.
        stages: its whole timeline, from the worker that finished it.
        ttft_s: from the gateway receiving the request to its first token.
        tpot_s: mean time between its tokens; None with fewer than two.
        duration_s: from the gateway receiving the request to this choice's last update; None: it was ended early.
    """

    index: int
    reason: FinishReason
    num_prompt_tokens: int
    num_output_tokens: int
    num_failovers: int
    ttft_s: float | None
    metrics: RequestMetrics | None = None
    stages: tuple[Stage, ...] = ()
    error: str | None = None
    tpot_s: float | None = None
    duration_s: float | None = None
