"""State of one request in the scheduler: a token list and a cursor.

`num_computed_tokens`, the cursor, says how much of the list has KV; the scheduler moves it toward `num_tokens`. Chunked
prefill, prefix hits, preemption and KV that comes from another worker are movements of the cursor; no flag stands for
any. Drafts are more tokens to compute, behind the list's end; those that turn out right are appended to it.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from tandem.core.hashing import extend_hashes
from tandem.core.pins import Pin
from tandem.core.sampling_params import SamplingParams
from tandem.core.types import FinishReason
from tandem.scheduler.draft_tally import DraftTally
from tandem.scheduler.output import SampledToken


class RequestState(Enum):
    """State of a request. It owns blocks in WAITING_FOR_KV and RUNNING only."""

    WAITING = auto()  # in the queue, new or preempted
    WAITING_FOR_KV = auto()  # admitted: its blocks are reserved for KV from another worker
    RUNNING = auto()
    FINISHED = auto()


@dataclass(frozen=True, slots=True)
class Handoff:
    """Division of a request's work between workers; by default this worker does everything.

    Args:
        output_token_ids: output tokens that other workers generated before; the output continues after them.
        num_new_tokens: stop after this many further tokens, whatever the request asks for; None = no such limit.
        num_expected_tokens: number of leading tokens whose KV comes from another worker; the request waits for it.
        lease_id: id of the lease under which another worker may read its blocks as they are computed; None = no worker.
        pins: prompt prefixes to keep in the cache; ignored if another worker computes all tokens, and keeps them.
    """

    output_token_ids: tuple[int, ...] = ()
    num_new_tokens: int | None = None
    num_expected_tokens: int = 0
    lease_id: str | None = None
    pins: tuple[Pin, ...] = ()


WHOLE = Handoff()


@dataclass(slots=True, eq=False)
class Request:
    """One request in the scheduler. Only the scheduler changes it.

    Args:
        request_id: unique among live requests.
        prompt_token_ids: at least one token.
        params: sampling parameters.
        seed: seed of its random numbers; constant, so that every worker draws the same.
        hash_root: parent hash of its first block (model, adapter, tenant).
        eos_token_ids: tokens that end it unless `params.ignore_eos`.
        max_tokens: maximum number of output tokens, resolved.
        priority: lower is more urgent.
        handoff: division of its work between workers.

    Attributes:
        token_ids: prompt and output so far. num_computed_tokens: the cursor.
        num_expected_tokens: leading tokens whose KV is yet to come from another worker.
        is_offered: that worker has leased KV for this request.
        awaited_hash: last block to wait for, which another request expects from its worker; None = it awaits none.
        pins, num_pinned_tokens: pins to grant, and tokens granted, by index of the pin.
        num_leased_blocks: leading blocks that were leased to other workers.
        num_cached_tokens: prompt tokens found in the prefix cache at the first admission (`was_admitted`).
        block_hashes: contents of its full blocks, each hashed with all before it.
        draft_token_ids: guesses of the tokens after `token_ids`, to be verified in the next step.
        stop_reason: the stop token or string that ended it, or the message of an error.
        order: sort key of urgency, least first: priority and step of arrival (`WaitingQueue`), then number of arrival.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    seed: int
    hash_root: bytes
    eos_token_ids: frozenset[int]
    max_tokens: int
    priority: int = 0
    handoff: Handoff = WHOLE

    token_ids: "array[int]" = field(init=False)
    num_prompt_tokens: int = field(init=False)
    num_expected_tokens: int = field(init=False)
    is_offered: bool = field(init=False, default=False)
    awaited_hash: bytes | None = field(init=False, default=None)
    pins: tuple[Pin, ...] = field(init=False)
    num_pinned_tokens: dict[int, int] = field(init=False, default_factory=dict)
    num_leased_blocks: int = field(init=False, default=0)
    num_computed_tokens: int = field(init=False, default=0)
    num_cached_tokens: int = field(init=False, default=0)
    num_preemptions: int = field(init=False, default=0)
    tally: DraftTally = field(init=False, default_factory=DraftTally)
    was_admitted: bool = field(init=False, default=False)
    block_hashes: list[bytes] = field(init=False, default_factory=list)
    draft_token_ids: Sequence[int] = field(init=False, default=())
    state: RequestState = field(init=False, default=RequestState.WAITING)
    finish_reason: FinishReason | None = field(init=False, default=None)
    stop_reason: int | str | None = field(init=False, default=None)
    order: tuple[int, int] = field(init=False, default=(0, 0))

    def __post_init__(self) -> None:
        self.token_ids = array("I", self.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.token_ids.extend(self.handoff.output_token_ids)
        self.num_expected_tokens = self.handoff.num_expected_tokens
        self.pins = self.handoff.pins

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_resumed_tokens(self) -> int:
        """Number of output tokens that other workers generated before."""
        return len(self.handoff.output_token_ids)

    @property
    def num_pending_tokens(self) -> int:
        """Number of tokens whose KV does not exist yet."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_computed_elsewhere(self) -> bool:
        """Whether another worker computes all its tokens so far, perhaps without having begun. KV that exists already,
        of a peer or the host tier, is never expected of the last token.
        """
        return self.num_expected_tokens >= self.num_prompt_tokens + self.num_resumed_tokens

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether cached prompt positions must be recomputed, since prompt logprobs need the logits of all of them."""
        return self.params.prompt_logprobs is not None and self.num_output_tokens == 0

    @property
    def is_decoding(self) -> bool:
        """Whether only the newest token is pending."""
        num_tokens = len(self.token_ids)
        return num_tokens - self.num_computed_tokens == 1 and num_tokens > self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :].tolist()

    @property
    def granted_pins(self) -> tuple[Pin, ...]:
        """The part of each pin that was granted, in the order of `pins`."""
        return tuple(Pin(self.num_pinned_tokens.get(index, 0), pin.ttl_s) for index, pin in enumerate(self.pins))

    def extend_hashes(self, block_size: int) -> None:
        """Bring `block_hashes` up to date with `token_ids`."""
        extend_hashes(self.hash_root, self.block_hashes, self.token_ids, block_size)

    def take(self, sampled: SampledToken) -> None:
        """Append what was sampled, or set the finish reason."""
        if sampled.error is not None:
            self.finish_reason, self.stop_reason = FinishReason.ERROR, sampled.error
        elif sampled.ends:
            self.finish_reason = FinishReason.STOP
        else:
            self.append(sampled.token_id)

    def append(self, token_id: int) -> None:
        """Append a sampled token, and set the finish reason if it ends the request."""
        self.token_ids.append(token_id)
        num_output_tokens = self.num_output_tokens
        if num_output_tokens >= self.params.min_tokens and self._stops_at(token_id):
            self.finish_reason = FinishReason.STOP
        elif num_output_tokens >= self.max_tokens:
            self.finish_reason = FinishReason.LENGTH

    def _stops_at(self, token_id: int) -> bool:
        if token_id in self.params.stop_token_ids:
            self.stop_reason = token_id
            return True
        return token_id in self.eos_token_ids and not self.params.ignore_eos
