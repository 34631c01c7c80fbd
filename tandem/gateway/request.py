"""A request as every dialect means it: token lists to continue, and what comes back of each. Plain values."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tandem.core.output import RequestMetrics, RequestOutput
from tandem.core.pins import Pin
from tandem.core.reasoning import ReasoningState
from tandem.core.sampling_params import SamplingParams
from tandem.core.scope import CacheScope
from tandem.core.timeline import Stage
from tandem.core.types import FinishReason, TokenLogprobs
from tandem.gateway.caching import LivePins, PromptSplit, split_prompt
from tandem.gateway.parts import AnswerParser, CallArguments, CallBegun, Part, PlainParser, Said, Thought, ToolCall


@dataclass(frozen=True, slots=True)
class ChoiceRequest:
    """One answer to one prompt. `params`: `n` is 1 and `seed` is set, so that any worker draws the same tokens."""

    index: int
    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeRequest:
    """What the core serves.

    Args:
        choices: answers wanted, in the order of their index.
        local_prefill: the decode worker must compute the prompt itself, as prompt logprobs need.
        num_expected_output: tokens an answer probably has.
        scope: between which requests its cached state is shared.
        pins: what is to be kept of the prompt, which all choices share.
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
    """What a client may see of one choice's `RequestOutput`: its text taken apart into `parts`, and no more tokens than
    a moderator has passed.
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
        """What it says to the user."""
        return "".join(part.text for part in self.parts if isinstance(part, Said))


@dataclass(slots=True)
class ChoiceResult:
    """What one choice amounts to so far.

    Args:
        keep: False counts only, which is all a stream needs.
        parser: takes its text apart.
        reasoning: counts its thinking tokens; None = the model does not think.
        pins, granted: those asked for, and what the worker made of them, once it has said so.
        live: what earlier requests' pins keep of this prompt.
        is_prompt_only: only the prompt is wanted; the one token that computing it takes is dropped.
        is_computed: the prompt is, since a token came.
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
    said: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def text(self) -> str:
        return "".join(self.said)

    @property
    def thought(self) -> str:
        return "".join(self.thoughts)

    @property
    def split(self) -> PromptSplit:
        """What the cache did with the prompt, as it is billed."""
        return split_prompt(self.num_prompt_tokens, self.num_cached_tokens, self.granted or (), self.live)

    @property
    def expected_split(self) -> PromptSplit:
        """`split`; before the worker has told, what it will be if all that was paid for is there and all is granted."""
        if self.granted is not None:
            return self.split
        num_cached = min(self.num_prompt_tokens, self.live.num_any)
        return split_prompt(self.num_prompt_tokens, num_cached, self.pins, self.live)

    @property
    def num_reasoning_tokens(self) -> int:
        return 0 if self.reasoning is None else self.reasoning.num_tokens

    def take(self, news: RequestOutput) -> ChoiceUpdate:
        """Count what is new; returns it taken apart."""
        self.is_computed |= bool(news.token_ids)
        if self.is_prompt_only:
            news = _of_prompt(news)
        parts = list(self.parser.feed(news.text))
        if news.finish_reason is not None:
            parts += self.parser.finish()
        self._count(news)
        return ChoiceUpdate(
            news.index,
            parts,
            news.token_ids,
            news.logprobs,
            news.prompt_logprobs,
            news.finish_reason,
            news.stop_reason,
        )

    def add(self, update: ChoiceUpdate) -> None:
        """What the client gets to see of it."""
        self.num_calls += sum(isinstance(part, CallBegun) for part in update.parts)
        self.finish_reason = update.finish_reason or self.finish_reason
        if self.keep:
            self._keep(update)

    def _count(self, news: RequestOutput) -> None:
        self.num_output_tokens += len(news.token_ids)
        if news.metrics is not None:
            self.num_cached_tokens = max(self.num_cached_tokens, news.metrics.num_cached_tokens)
            self.granted = news.metrics.pins
        self.stop_reason = news.stop_reason if news.stop_reason is not None else self.stop_reason
        if self.reasoning is not None:
            for token_id in news.token_ids:
                self.reasoning.observe(token_id)

    def _keep(self, update: ChoiceUpdate) -> None:
        for part in update.parts:
            match part:
                case Said():
                    self.said.append(part.text)
                case Thought():
                    self.thoughts.append(part.text)
                case CallBegun():
                    self.calls.append(ToolCall(part.call_id, part.name))
                case CallArguments():
                    self.calls[part.index].arguments += part.text
        self.token_ids += update.token_ids
        self.logprobs += update.logprobs or ()
        self.prompt_logprobs = self.prompt_logprobs or update.prompt_logprobs


def _of_prompt(news: RequestOutput) -> RequestOutput:
    """`news` without what was generated; an answer without a token ends by its length."""
    reason = FinishReason.LENGTH if news.finish_reason is FinishReason.STOP else news.finish_reason
    return replace(news, token_ids=(), text="", logprobs=None, finish_reason=reason, stop_reason=None)


@dataclass(frozen=True, slots=True)
class ChoiceEnd:
    """How a choice ended, for metrics and the request's history.

    Args:
        reason: stop, length, abort or error.
        error: what ended it early.
        stages: its whole timeline, of the worker that finished it.
        ttft_s: from the gateway taking the request to its first token.
        tpot_s: mean time between its tokens; None with fewer than two.
        duration_s: from the gateway taking the request to this choice's last news; None: it was ended early.
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
