"""The whole contract between deciding and executing: what one step computes, as plain data.

Nothing here refers to an object that the scheduler goes on changing, so a step can be sent to another process. A
request is described once, when it is first scheduled; later steps say what is new of it, until `released` names it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tandem.core.sampling_params import SamplingParams
from tandem.core.types import TokenLogprobs
from tandem.kvcache.block_table import BlockRange


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request the executor has not been told of, or not since it was released.

    Args:
        request_id: by which later steps name it.
        prompt_token_ids: its prompt.
        output_token_ids: chosen before, here or elsewhere.
        params: how its tokens are chosen.
        seed: of its random numbers.
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
    """What has changed of a request's block tables, a KV group each.

    Args:
        added: block ids to append.
        num_dropped: so many leading entries, of all, have left the group's window and are the null block now.
    """

    added: tuple[Sequence[int], ...]
    num_dropped: tuple[int, ...]


@dataclass(slots=True)
class ScheduledRequest:
    """Compute `token_ids`, the request's tokens from position `start` on.

    Nobody changes it. NOTE: not frozen, which would take nine times as long to make, for each request and step.

    Args:
        request_id: of a request that this or an earlier step described.
        start: position of the first token: where the request's cursor was.
        token_ids: at least one.
        samples: whether the last token's logits choose a new token: only when the cursor catches up.
        scores_prompt: whether the logits of all tokens are asked for.
        blocks: None = its block tables have not changed.
    """

    request_id: str
    start: int
    token_ids: Sequence[int]
    samples: bool
    scores_prompt: bool = False
    blocks: NewBlocks | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def end(self) -> int:
        """Where the cursor will be."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step.

    Args:
        new: the scheduled requests that have not been described yet.
        scheduled: what to compute.
        released: ids of requests whose blocks were taken back since the last step (finished, aborted or preempted):
            whatever an executor keeps for them is stale. They may be among `new` again.
    """

    new: tuple[NewRequest, ...]
    scheduled: tuple[ScheduledRequest, ...]
    released: tuple[str, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(item.token_ids) for item in self.scheduled)


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
