"""The whole contract between deciding and executing: what one step computes."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tandem.core.types import TokenLogprobs
from tandem.kvcache.block_table import BlockRange, BlockTable
from tandem.scheduler.request import Request


@dataclass(slots=True)
class ScheduledRequest:
    """Compute tokens `[start, start + num_tokens)`; `start` is where the request's cursor was when it was scheduled.

    Nobody changes it. NOTE: not frozen, which would take nine times as long to make, for each request and step.

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
        self.start = self.request.num_computed_tokens
        self.samples = self.start + self.num_tokens == len(self.request.token_ids)

    @property
    def end(self) -> int:
        """Where the cursor will be."""
        return self.start + self.num_tokens

    @property
    def scores_prompt(self) -> bool:
        """Whether the logits of all its tokens are asked for."""
        return self.request.params.prompt_logprobs is not None and self.request.num_output_tokens == 0


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


@dataclass(slots=True)
class SampledToken:
    """The token chosen for one request, or why none could be. `ends`: none was needed, the answer is complete.

    Nobody changes it. NOTE: not frozen, for the same reason as `ScheduledRequest`.
    """

    token_id: int
    logprobs: TokenLogprobs | None = None
    error: str | None = None
    ends: bool = False

    @property
    def is_token(self) -> bool:
        return self.error is None and not self.ends


@dataclass(frozen=True, slots=True)
class ExecutorOutput:
    """What a step computed: a token for every request that samples, and prompt logprobs where asked for.

    `prompt_logprobs[request_id]` covers the prompt positions this step computed, in order.
    """

    sampled: Mapping[str, SampledToken]
    prompt_logprobs: Mapping[str, tuple[TokenLogprobs, ...]]


@dataclass(frozen=True, slots=True)
class KVReserved:
    """A request has blocks for KV that comes from elsewhere. They stay pinned until the hold `fetch_id` is dropped.

    `groups`: the blocks to fill, one range a KV group; tokens before `num_held_tokens` are here already.
    """

    request_id: str
    fetch_id: str
    num_held_tokens: int
    num_expected_tokens: int
    groups: tuple[BlockRange, ...]


@dataclass(frozen=True, slots=True)
class KVComputed:
    """More blocks of a request are leased: their KV reaches to token `num_tokens`. `groups`: what is new."""

    request_id: str
    lease_id: str
    num_tokens: int
    groups: tuple[BlockRange, ...]
    is_last: bool


KVNews = KVReserved | KVComputed
