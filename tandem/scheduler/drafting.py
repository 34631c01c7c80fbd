"""Drafts (guessed tokens, verified in the next step) within the scheduler: adds them to a step, counts and replaces
them.

They get only the token budget and the blocks that are left.
"""

from collections.abc import Mapping, Sequence

from tandem.kvcache.manager import KVCacheManager
from tandem.scheduler.counters import SchedulerCounters
from tandem.scheduler.output import DraftTimes, ExecutorOutput, ScheduledRequest
from tandem.scheduler.request import Request
from tandem.scheduler.step_plan import StepPlan


class Drafting:
    """Adds drafts to steps and counts them. The drafts themselves are in `Request.draft_token_ids`."""

    def __init__(self, kv: KVCacheManager, counters: SchedulerCounters) -> None:
        self._kv = kv
        self._counters = counters

    def add(self, plan: StepPlan) -> None:
        """Extend the shares of an otherwise complete step by drafts. Preempts no request."""
        for request, _ in list(plan.shares.values()):
            num_drafts = min(len(request.draft_token_ids), plan.budget)
            if num_drafts and self._grow(request, request.num_tokens + num_drafts):
                plan.extend(request, num_drafts)

    def _grow(self, request: Request, end: int) -> bool:
        """Allocate blocks up to `end`, one by one; returns whether all were available. The cursor may stop in any of
        them, and a layer may keep more of a block in which it stops. Blocks that the end of the last whole block
        attends to are kept, since the request may end before another block is whole.
        """
        block_size = self._kv.layout.block_size
        start = request.num_computed_tokens // block_size * block_size
        ends = (*range((request.num_tokens // block_size + 1) * block_size, end, block_size), end)
        return all(self._kv.grow(request.request_id, start, stop) for stop in ends)

    def note_step(self, result: ExecutorOutput) -> None:
        """Count the time that a step's drafts saved, averaged over its requests."""
        num_tokens = sum(map(len, result.sampled.values())) / max(1, len(result.sampled))
        self._counters.tally.saved_s += result.draft_times.saved_s(num_tokens)

    def note_sampled(self, request: Request, item: ScheduledRequest, num_sampled: int, times: DraftTimes) -> None:
        """Count the drafts of a step that sampled `num_sampled` tokens: the accepted drafts and one more."""
        assert 1 <= num_sampled <= 1 + item.num_drafts, f"{request.request_id} got {num_sampled} tokens"
        if item.start >= request.num_prompt_tokens:
            for tally in (self._counters.tally, request.tally):
                tally.note_decode(item.num_drafts, num_sampled - 1)
            request.tally.saved_s += times.saved_s(num_sampled)

    def replace(self, requests: Mapping[str, Request], drafts: Mapping[str, Sequence[int]]) -> None:
        """Store the drafts for the next step, as far as a request may still generate tokens."""
        for request_id, token_ids in drafts.items():
            request = requests.get(request_id)
            if request is not None and request.is_decoding:
                request.draft_token_ids = token_ids[: request.max_tokens - request.num_output_tokens - 1]
