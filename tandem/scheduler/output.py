"""Contract between scheduler and executor: the work of one step, as plain data.

Nothing here refers to mutable state of the scheduler, so a step can be sent to another process. A request is described
once, when it is first scheduled; later steps carry its changes only, until `released` names it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tandem.core.sampling_params import SamplingParams
from tandem.core.types import TokenLogprobs
from tandem.kvcache.block_table import BlockRange


@dataclass(frozen=True, slots=True)
class NewRequest:
    """Description of a request that the executor does not know, or no longer knows since it was released.

    Args:
        request_id: id that later steps refer to.
        prompt_token_ids: its prompt.
        output_token_ids: output tokens generated before, here or on other workers.
        params: sampling parameters.
        seed: seed of its random numbers.
        eos_token_ids: tokens that end it unless `params.ignore_eos`.
        hash_root: parent hash of its first block: equal tokens have equal KV only where this is equal.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    params: SamplingParams
    seed: int
    eos_token_ids: frozenset[int]
    hash_root: bytes


@dataclass(frozen=True, slots=True)
class NewBlocks:
    """Changes of a request's block tables, one entry per KV group.

    Args:
        added: block ids to append.
        num_dropped: number of leading entries of the whole table that have left the group's window and are now the
            null block.
        pages: pages of those added blocks that have several, by block id.
    """

    added: tuple[Sequence[int], ...]
    num_dropped: tuple[int, ...]
    pages: Mapping[int, Sequence[int]] = field(default_factory=dict)


@dataclass(slots=True)
class ScheduledRequest:
    """Work for one request in a step: compute `token_ids`, its tokens from position `start` on.

    Immutable by convention. NOTE: not frozen, which would make construction nine times slower, per request and step.

    Args:
        request_id: id of a request that this or an earlier step described.
        start: position of the first token: the request's cursor before this step.
        token_ids: tokens to compute, at least one.
        samples: whether new tokens are sampled: only when the cursor reaches the end of the request's list.
        scores_prompt: whether the logits of all tokens are needed, for prompt logprobs.
        blocks: changes of its block tables; None if there are none.
        num_drafts: number of last tokens that are guesses. The logits of the token before the first draft choose a
            token; those of a draft do too if all before, itself included, equal the tokens chosen.
    """

    request_id: str
    start: int
    token_ids: Sequence[int]
    samples: bool
    scores_prompt: bool = False
    blocks: NewBlocks | None = None
    num_drafts: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def end(self) -> int:
        """Position of the cursor after this step if every draft is accepted."""
        return self.start + len(self.token_ids)

    @property
    def draft_token_ids(self) -> Sequence[int]:
        return self.token_ids[len(self.token_ids) - self.num_drafts :]


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """Work of one step.

    Args:
        new: the scheduled requests that have not been described yet.
        scheduled: tokens to compute, by request.
        released: ids of requests whose blocks were released since the last step (finished, aborted or preempted):
            executor state for them is stale. They may be among `new` again.
    """

    new: tuple[NewRequest, ...]
    scheduled: tuple[ScheduledRequest, ...]
    released: tuple[str, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(item.token_ids) for item in self.scheduled)


@dataclass(slots=True)
class SampledToken:
    """Token sampled for one request, or the error that prevented it. `ends`: the output was complete without a token.

    `token_id` means nothing unless `is_token`. Immutable by convention. NOTE: not frozen, for the same reason as
    `ScheduledRequest`.
    """

    token_id: int
    logprobs: TokenLogprobs | None = None
    error: str | None = None
    ends: bool = False

    @property
    def is_token(self) -> bool:
        return self.error is None and not self.ends


@dataclass(frozen=True, slots=True)
class DraftTimes:
    """Effect of drafts on a step's time, in seconds.

    Args:
        drafter_s: time of the drafter itself.
        plain_s: usual time of such a step without drafts; None = the step had no drafts, or that time is not known.
        step_s: time of the step with drafts, without the drafter's.
    """

    drafter_s: float = 0.0
    plain_s: float | None = None
    step_s: float = 0.0

    def saved_s(self, num_tokens: float) -> float:
        """Seconds that drafts saved a request that got `num_tokens` tokens in the step; negative = lost."""
        spared_s = 0.0 if self.plain_s is None else num_tokens * self.plain_s - self.step_s
        return spared_s - self.drafter_s


@dataclass(frozen=True, slots=True)
class ExecutorOutput:
    """Results of a step.

    Args:
        sampled: for every request that samples, its next tokens, at least one: as many drafts as were right, which are
            sampled tokens like any others, and one more.
        prompt_logprobs: where requested, of the prompt positions that this step computed, in order.
        drafts: guesses of the tokens after those sampled, by request. They need not be right.
        draft_times: what drafting took and brought.
    """

    sampled: Mapping[str, Sequence[SampledToken]]
    prompt_logprobs: Mapping[str, tuple[TokenLogprobs, ...]]
    drafts: Mapping[str, Sequence[int]] = field(default_factory=dict)
    draft_times: DraftTimes = DraftTimes()

    @property
    def num_accepted(self) -> int:
        """Number of drafts that became tokens."""
        return sum(map(len, self.sampled.values())) - len(self.sampled)


@dataclass(frozen=True, slots=True)
class KVReserved:
    """Event: blocks were allocated for a request's KV from another worker, held until `KVCacheManager.drop(fetch_id)`.

    Args:
        num_held_tokens: number of leading tokens whose KV is present already.
        num_expected_tokens: number of leading tokens whose KV is expected, the held ones included.
        groups: the blocks to fill, one range per KV group.
    """

    request_id: str
    fetch_id: str
    num_held_tokens: int
    num_expected_tokens: int
    groups: tuple[BlockRange, ...]


@dataclass(frozen=True, slots=True)
class KVComputed:
    """Event: more blocks of a request are leased to another worker, under the `Handoff.lease_id` of the request; with
    those leased before, their KV covers the first `num_tokens` tokens.

    Args:
        groups: the blocks added, one range per KV group.
        is_last: KV of all tokens is leased now.
    """

    request_id: str
    lease_id: str
    num_tokens: int
    groups: tuple[BlockRange, ...]
    is_last: bool


KVEvent = KVReserved | KVComputed
