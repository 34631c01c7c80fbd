"""One request: a token list and a cursor.

`num_computed_tokens` says how much of the list has KV; the scheduler moves it toward `num_tokens`. Chunked prefill,
prefix hits, preemption and KV that comes from another worker are movements of the cursor; no flag stands for any.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from tandem.core.hashing import extend_hashes
from tandem.core.pins import Pin
from tandem.core.sampling_params import SamplingParams
from tandem.core.types import FinishReason


class RequestState(Enum):
    """Where a request is. Only in WAITING_FOR_KV and RUNNING it owns blocks."""

    WAITING = auto()
    WAITING_FOR_KV = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(frozen=True, slots=True)
class Handoff:
    """What other workers do of a request, and what is left for later ones; by default nothing.

    Args:
        output_token_ids: generated elsewhere before; the answer continues after them.
        num_new_tokens: stop after so many further tokens, whatever the request asks for; None = go on to its end.
        num_expected_tokens: KV of so many leading tokens will come from elsewhere: the request waits for it.
        lease_id: lease its blocks under this name as they are computed, for a peer to read.
        pins: beginnings of the prompt to keep, unless all of the prompt's KV comes from elsewhere: who computes it,
            keeps it.
    """

    output_token_ids: tuple[int, ...] = ()
    num_new_tokens: int | None = None
    num_expected_tokens: int = 0
    lease_id: str | None = None
    pins: tuple[Pin, ...] = ()


WHOLE = Handoff()


@dataclass(slots=True, eq=False)
class Request:
    """Changed by the scheduler alone; everybody else reads.

    Args:
        request_id: unique among live requests.
        prompt_token_ids: at least one token.
        params: how tokens are chosen.
        seed: of its random numbers; fixed for its life, so that any worker draws the same.
        hash_root: parent hash of its first block (model, adapter, tenant).
        eos_token_ids: tokens that end it unless `params.ignore_eos`.
        max_tokens: the most output tokens, resolved.
        priority: lower is more urgent.
        handoff: what other workers do of it.
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

    token_ids: list[int] = field(init=False)
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
    was_admitted: bool = field(init=False, default=False)
    block_hashes: list[bytes] = field(init=False, default_factory=list)
    state: RequestState = field(init=False, default=RequestState.WAITING)
    finish_reason: FinishReason | None = field(init=False, default=None)
    stop_reason: int | str | None = field(init=False, default=None)
    order: tuple[int, int] = field(init=False, default=(0, 0))

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.token_ids += self.handoff.output_token_ids
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
        """Output tokens that were generated elsewhere before."""
        return len(self.handoff.output_token_ids)

    @property
    def num_pending_tokens(self) -> int:
        """Tokens whose KV does not exist yet."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_computed_elsewhere(self) -> bool:
        """Whether another worker computes all of its prompt, and has perhaps not begun."""
        return self.num_expected_tokens >= self.num_prompt_tokens

    @property
    def needs_whole_prompt(self) -> bool:
        """Prompt logprobs need the logits of every prompt position, so cached positions must be computed again."""
        return self.params.prompt_logprobs is not None and self.num_output_tokens == 0

    @property
    def is_decoding(self) -> bool:
        """Whether only the newest token is pending."""
        num_tokens = len(self.token_ids)
        return num_tokens - self.num_computed_tokens == 1 and num_tokens > self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def granted_pins(self) -> tuple[Pin, ...]:
        """What of `pins` was granted, in their order."""
        return tuple(Pin(self.num_pinned_tokens.get(index, 0), pin.ttl_s) for index, pin in enumerate(self.pins))

    def extend_hashes(self, block_size: int) -> None:
        """Bring `block_hashes` up to date with `token_ids`."""
        extend_hashes(self.hash_root, self.block_hashes, self.token_ids, block_size)

    def append(self, token_id: int) -> None:
        """Take a chosen token, and finish if it ends the request."""
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
