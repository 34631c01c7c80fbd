"""The whole contract between deciding and executing: what one step computes."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tandem.core.types import TokenLogprobs
from tandem.kvcache.block_table import BlockTable
from tandem.scheduler.request import Request


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """Compute tokens `[start, start + num_tokens)`; `start` is where the request's cursor was when it was scheduled.

    `samples`: whether the last token's logits choose a new token: only when the cursor catches up. The executor reads
    the request and its block table and changes neither.
    """

    request: Request
    num_tokens: int
    block_table: BlockTable
    start: int = field(init=False)
    samples: bool = field(init=False)

    def __post_init__(self) -> None:
        # NOTE: fixed here, since the request moves on while a step may still be looked at.
        object.__setattr__(self, "start", self.request.num_computed_tokens)
        object.__setattr__(self, "samples", self.end == self.request.num_tokens)

    @property
    def end(self) -> int:
        """Where the cursor will be."""
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step. `released` names requests whose blocks were taken back since the last step (finished, aborted or
    preempted): whatever an executor keeps for them is stale.
    """

    scheduled: tuple[ScheduledRequest, ...]
    released: tuple[str, ...]

    @property
    def num_tokens(self) -> int:
        return sum(item.num_tokens for item in self.scheduled)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The token chosen for one request, or why none could be."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ExecutorOutput:
    """What a step computed: a token for every request that samples, and prompt logprobs where asked for.

    `prompt_logprobs[request_id]` covers the prompt positions this step computed, in order.
    """

    sampled: Mapping[str, SampledToken]
    prompt_logprobs: Mapping[str, tuple[TokenLogprobs, ...]]
