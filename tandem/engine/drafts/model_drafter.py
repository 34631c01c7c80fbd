"""Drafter by a draft model: a small model of the same vocabulary continues each request by a few tokens.

It has a KV pool of its own, with a prefix cache. A request's KV there follows the accepted tokens: KV of a wrong guess
is overwritten. A request that is new, was preempted or comes from another worker starts without KV and is caught up in
chunks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from tandem.core.hashing import extend_hashes
from tandem.engine.drafts.drawing import drawing_state
from tandem.engine.forward_pass import ForwardPass
from tandem.engine.logits import SamplingState
from tandem.engine.sampler import Sampler
from tandem.kvcache.block_table import BlockTable
from tandem.kvcache.manager import KVCacheManager
from tandem.scheduler.output import NewRequest, SampledToken, ScheduledRequest, SchedulerOutput
from tandem.scheduler.step_deltas import TableChanges

_UNKNOWN_TOKEN = 0  # stands for a token that only the served model has


@dataclass(slots=True)
class _Followed:
    """State of one request in the drafter.

    Args:
        token_ids: prompt and output.
        num_computed: leading tokens with a state; the others are pending.
        ahead: guesses behind the last token that have a state too.
        table: None = it has no blocks.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    hash_root: bytes
    state: SamplingState
    num_computed: int = 0
    ahead: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    table: BlockTable | None = None
    changes: TableChanges = field(default_factory=TableChanges)

    def append(self, token_id: int) -> None:
        if self.ahead and self.ahead[0] == token_id:
            del self.ahead[0]
            self.num_computed += 1
        else:
            self.ahead.clear()
        self.token_ids.append(token_id)

    @property
    def num_pending(self) -> int:
        """Number of tokens to compute, at least one: the last token's logits are needed."""
        return max(1, len(self.token_ids) - self.num_computed)


class ModelDrafter:
    """Implements `drafter.Drafter`. Guesses are drawn with the request's temperature, top-k, top-p and min-p, and with
    the random numbers of its seed and positions, so that two models that agree draw the same tokens.

    Args:
        forward: the draft model.
        kv: its blocks.
        sampler: draws the guesses.
        vocab_size: of the served model; no guess lies beyond it.
        max_model_len: longest sequence of the draft model in tokens; longer requests get no drafts.
    """

    def __init__(
        self, forward: ForwardPass, kv: KVCacheManager, sampler: Sampler, *, vocab_size: int, max_model_len: int
    ) -> None:
        self._forward = forward
        self._kv = kv
        self._sampler = sampler
        self._vocab_size = min(vocab_size, forward.vocab_size)
        self._max_model_len = max_model_len
        self._followed: dict[str, _Followed] = {}
        self._released: list[str] = []

    def begin(self, request: NewRequest) -> None:
        self._followed[request.request_id] = _Followed(
            request.request_id,
            [*request.prompt_token_ids, *request.output_token_ids],
            len(request.prompt_token_ids),
            request.hash_root,
            drawing_state(request, self._vocab_size),
        )

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        followed = self._followed[request_id]
        for token_id in token_ids:
            followed.append(token_id)

    @torch.inference_mode()
    def draft(self, limits: Mapping[str, int]) -> Mapping[str, Sequence[int]]:
        """Guess with one step that brings all requests up to date, within the token budget, and one more for each
        further token. Requests without room in the pool, or not yet up to date, are left out.
        """
        guesses: dict[str, list[int]] = {}
        items = self._catch_up(limits)
        depth = 0
        while items:
            growing = self._compute(items, depth)
            depth += 1
            items = []
            for followed, token in growing:
                guess = guesses.setdefault(followed.request_id, [])
                guess.append(token.token_id)
                if depth < limits[followed.request_id]:
                    items += self._further(followed, token.token_id)
        return guesses

    def end(self, request_id: str) -> None:
        followed = self._followed.pop(request_id)
        if followed.table is not None:
            self._kv.release(request_id)
            self._released.append(request_id)

    def check(self) -> None:
        """Check that the blocks are accounted for.

        Raises:
            AssertionError: they are not.
        """
        self._kv.check()
        assert self._followed or self._kv.usage.used == 0, "blocks of the draft model are used by nobody"

    def _catch_up(self, limits: Mapping[str, int]) -> list[ScheduledRequest]:
        """Pending tokens of the requests, the shortest first, so that a new prompt does not keep others waiting."""
        budget = self._kv.max_chunk_tokens
        items = []
        for followed in sorted(
            (self._followed[request_id] for request_id in limits), key=lambda each: each.num_pending
        ):
            if len(followed.token_ids) >= self._max_model_len or not self._admit(followed):
                continue
            followed.ahead.clear()
            followed.num_computed = start = len(followed.token_ids) - followed.num_pending
            count = min(followed.num_pending, budget)
            if count and self._kv.grow(followed.request_id, start, start + count):
                budget -= count
                items.append(self._item(followed, start, followed.token_ids[start : start + count]))
        return items

    def _admit(self, followed: _Followed) -> bool:
        """Whether the request has blocks, from now on at the latest."""
        if followed.table is not None:
            return True
        self._extend_hashes(followed)
        match = self._kv.match(followed.block_hashes, len(followed.token_ids))
        if not self._kv.can_admit(match, len(followed.token_ids)):
            return False
        followed.table = self._kv.admit(followed.request_id, match, followed.block_hashes, len(followed.token_ids))
        followed.num_computed = match.num_blocks * self._kv.layout.block_size
        return True

    def _further(self, followed: _Followed, token_id: int) -> list[ScheduledRequest]:
        """The step of a guess that another is to follow; none where blocks or positions are lacking."""
        position = len(followed.token_ids) + len(followed.ahead)
        # NOTE: what no token from the last one on attends to may be released, whatever becomes of the guesses
        if position >= self._max_model_len or not self._kv.grow(
            followed.request_id, len(followed.token_ids) - 1, position + 1
        ):
            return []
        followed.ahead.append(token_id)
        return [self._item(followed, position, [token_id])]

    def _item(self, followed: _Followed, start: int, token_ids: Sequence[int]) -> ScheduledRequest:
        assert followed.table is not None
        known = [token_id if token_id < self._forward.vocab_size else _UNKNOWN_TOKEN for token_id in token_ids]
        samples = start + len(known) >= len(followed.token_ids)
        return ScheduledRequest(
            followed.request_id, start, known, samples, blocks=followed.changes.of(followed.table, self._kv.pages_of)
        )

    def _compute(self, items: Sequence[ScheduledRequest], depth: int) -> list[tuple[_Followed, SampledToken]]:
        """Compute a step; returns the requests that got a token, with it."""
        released, self._released = tuple(self._released), []
        inputs, hidden = self._forward.run(SchedulerOutput((), tuple(items), released))
        if depth == 0:
            for item in items:
                self._note_computed(self._followed[item.request_id], item.end)
        sampling = [self._followed[item.request_id] for item in items if item.samples]
        if not sampling:
            self._forward.await_kernels()
            return []
        for followed in sampling:
            followed.state.num_output_tokens = len(followed.token_ids) - followed.num_prompt_tokens + depth
        logits = self._forward.logits(hidden, inputs.sample_rows)[:, : self._vocab_size]
        tokens = self._sampler.sample(logits, [followed.state for followed in sampling])
        return [(followed, token) for followed, token in zip(sampling, tokens, strict=True) if token.is_token]

    def _note_computed(self, followed: _Followed, num_computed: int) -> None:
        followed.num_computed = num_computed
        self._extend_hashes(followed)
        self._kv.commit(followed.request_id, followed.block_hashes, num_computed)

    def _extend_hashes(self, followed: _Followed) -> None:
        extend_hashes(followed.hash_root, followed.block_hashes, followed.token_ids, self._kv.layout.block_size)
