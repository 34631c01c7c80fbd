"""The whole contract between deciding and executing: what one step computes."""

from collections.abc import Mapping
from dataclasses import dataclass

from tandem.core.types import TokenLogprobs
from tandem.kvcache.block_table import BlockTable
from tandem.scheduler.request import Request


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """Compute tokens `[request.num_computed_tokens, request.num_computed_tokens + num_tokens)`.

    The executor reads the request and its block table and changes neither.
    """

    request: Request
    num_tokens: int
    block_table: BlockTable

    @property
    def end(self) -> int:
        """Where the cursor will be."""
        return self.request.num_computed_tokens + self.num_tokens

    @property
    def samples(self) -> bool:
        """Whether the last token's logits choose a new token: only when the cursor catches up."""
        return self.end == self.request.num_tokens


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
