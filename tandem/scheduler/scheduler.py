"""One rule: every step moves cursors toward the ends of their token lists, within one token budget.

Running decodes come first, so a long prompt never stalls them; then prompts under way; then waiting requests while
blocks last. When blocks run out the least urgent running request is preempted: its cursor goes back and it waits again.
The most urgent request can always go on, so every request ends.
"""

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass

from tandem.core.config import SchedulerConfig
from tandem.core.errors import CapacityError, InvalidRequestError, shown
from tandem.core.types import FinishReason
from tandem.kvcache.block_table import BlockTable
from tandem.kvcache.manager import KVCacheManager
from tandem.kvcache.prefix import PrefixMatch
from tandem.scheduler.output import ExecutorOutput, ScheduledRequest, SchedulerOutput
from tandem.scheduler.queue import WaitingQueue
from tandem.scheduler.request import Request, RequestState

MAX_PRIORITY = 100  # levels; each is worth `aging_steps` of waiting, so more would be starvation by another name


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since start."""

    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_cached_prompt_tokens: int = 0


class Scheduler:
    """Decides each step's work. Call `schedule`, execute, `update`; `add` and `abort` in between, at any time."""

    def __init__(self, config: SchedulerConfig, kv: KVCacheManager) -> None:
        assert kv.max_chunk_tokens >= config.max_num_batched_tokens, "block accounting expects smaller chunks"
        self.config = config
        self.counters = SchedulerCounters()
        self._kv = kv
        self._requests: dict[str, Request] = {}
        self._tables: dict[str, BlockTable] = {}
        self._waiting = WaitingQueue()
        self._running: list[Request] = []
        self._released: list[str] = []
        self._step = 0
        self._num_added = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def get(self, request_id: str) -> Request | None:
        return self._requests.get(request_id)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            InvalidRequestError: when it could never run, or its id is taken.
            CapacityError: when the queue is full.
        """
        self._refuse_impossible(request)
        if len(self._waiting) >= self.config.max_num_waiting:
            raise CapacityError(f"{len(self._waiting)} requests are waiting, the most allowed; try again later")
        request.order = (request.priority * self.config.aging_steps + self._step, self._num_added)
        request.extend_hashes(self._kv.layout.block_size)
        self._num_added += 1
        self._requests[request.request_id] = request
        self._waiting.push(request)

    def finish(self, request_id: str, reason: FinishReason, stop_reason: int | str | None = None) -> Request | None:
        """End a request now, wherever it is, and take its blocks back. None when there is no such request."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        request.finish_reason, request.stop_reason = reason, stop_reason
        self._remove(request)
        return request

    def schedule(self) -> SchedulerOutput:
        """Choose this step's work. Empty only when nothing waits or runs; `released` then keeps for the next step."""
        self._step += 1
        plan = _StepPlan(self.config.max_num_batched_tokens)
        num_preempted = self.counters.num_preemptions
        for request in self._catch_up_order():
            self._advance(request, plan)
        if self.counters.num_preemptions == num_preempted:
            self._admit(plan)
        if not plan.scheduled:
            return SchedulerOutput((), ())
        released, self._released = tuple(self._released), []
        return SchedulerOutput(tuple(plan.scheduled.values()), released)

    def update(self, output: SchedulerOutput, result: ExecutorOutput) -> list[Request]:
        """Move the cursors that `output` planned and take the chosen tokens; returns the requests that ended."""
        ended = []
        for item in output.scheduled:
            request = item.request
            if request.state is not RequestState.RUNNING:
                continue
            request.num_computed_tokens = item.end
            sampled = result.sampled.get(request.request_id)
            if sampled is None or sampled.error is None:  # NOTE: whatever broke a request must not become findable
                self._kv.commit(request.request_id, request.block_hashes, request.num_computed_tokens)
            if sampled is None:
                assert request.num_pending_tokens, f"{request.request_id} was to get a token and got none"
                continue
            assert not request.num_pending_tokens, f"{request.request_id} got a token before its prompt was computed"
            if sampled.error is not None:
                request.finish_reason, request.stop_reason = FinishReason.ERROR, sampled.error
            else:
                request.append(sampled.token_id)
                request.extend_hashes(self._kv.layout.block_size)
            if request.finish_reason is not None:
                self._remove(request)
                ended.append(request)
        return ended

    def check(self) -> None:
        """Prove that exactly the running requests own blocks, and that the block accounting holds.

        Raises:
            AssertionError: naming what is wrong.
        """
        self._kv.check()
        running = {request.request_id for request in self._running}
        assert running == set(self._tables), "a request owns blocks without running, or runs without blocks"
        assert len(self._running) + len(self._waiting) == len(self._requests), "a request is lost"
        if not self._requests:
            assert self._kv.usage.used == 0, f"{self._kv.usage.used} blocks are used by nobody"

    def _refuse_impossible(self, request: Request) -> None:
        if request.request_id in self._requests:
            raise InvalidRequestError(f"request_id={request.request_id!r} is in use; ids of live requests are unique")
        if type(request.priority) is not int or abs(request.priority) > MAX_PRIORITY:
            raise InvalidRequestError(
                f"priority={shown(request.priority)} must be an integer from {-MAX_PRIORITY} to {MAX_PRIORITY}"
            )
        if not request.prompt_token_ids:
            raise InvalidRequestError("the prompt is empty: it needs at least one token")
        if request.max_tokens < 1:
            raise InvalidRequestError(
                f"max_tokens={request.max_tokens} leaves no room for an answer; at least 1 is needed"
            )
        longest = request.num_prompt_tokens + request.max_tokens
        if longest > self.config.max_model_len:
            raise InvalidRequestError(
                f"{request.num_prompt_tokens} prompt tokens and max_tokens={request.max_tokens} exceed the context of "
                f"{self.config.max_model_len} tokens; shorten the prompt or lower max_tokens"
            )
        if not self._kv.fits(longest):
            raise InvalidRequestError(
                f"{longest} tokens do not fit into {self._kv.usage.total} KV blocks of "
                f"{self._kv.layout.block_size} tokens; shorten the request or enlarge the KV cache"
            )

    def _catch_up_order(self) -> Iterator[Request]:
        """Running requests, decodes first, each kind in order of urgency; requests preempted meanwhile are left out."""
        decoding = [request for request in self._running if request.is_decoding]
        prefilling = [request for request in self._running if not request.is_decoding]
        for request in decoding + prefilling:
            if request.state is RequestState.RUNNING:
                yield request

    def _advance(self, request: Request, plan: "_StepPlan") -> None:
        count = min(request.num_pending_tokens, plan.budget)
        if count == 0:
            return
        computed = request.num_computed_tokens
        while not self._kv.grow(request.request_id, computed, computed + count):
            victim = self._running[-1]
            plan.drop(victim)
            self._preempt(victim)
            if victim is request:
                return
        plan.add(ScheduledRequest(request, count, self._tables[request.request_id]))

    def _preempt(self, request: Request) -> None:
        self._release(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.state = RequestState.WAITING
        self.counters.num_preemptions += 1
        self._waiting.push(request)

    def _admit(self, plan: "_StepPlan") -> None:
        """Start waiting requests in order. One that lacks blocks holds back those behind it, so that it cannot starve;
        one whose next block is being computed by another request steps aside until that block can be shared.
        """
        aside: list[Request] = []
        awaited: set[tuple[int, bytes]] = set()
        while plan.budget and len(self._running) < self.config.max_num_running:
            request = self._waiting.pop()
            if request is None:
                break
            if _has_any_block(request, awaited):
                aside.append(request)
                continue
            match = self._find_prefix(request)
            if self._awaits_shared_block(request, match):
                awaited.add((match.num_blocks, request.block_hashes[match.num_blocks]))
                aside.append(request)
            elif not self._start(request, match):
                aside.append(request)
                break
            else:
                self._advance(request, plan)
        for request in aside:
            self._waiting.push(request)

    def _find_prefix(self, request: Request) -> PrefixMatch:
        hashes = [] if _needs_whole_prompt(request) else request.block_hashes
        return self._kv.match(hashes, request.num_tokens)

    def _awaits_shared_block(self, request: Request, match: PrefixMatch) -> bool:
        if _needs_whole_prompt(request):
            return False
        reusable = (request.num_tokens - 1) // self._kv.layout.block_size
        return match.num_blocks < reusable and self._kv.is_being_computed(request.block_hashes[match.num_blocks])

    def _start(self, request: Request, match: PrefixMatch) -> bool:
        if not self._kv.can_open(match, request.num_tokens):
            return False
        table = self._kv.open(request.request_id, match, request.block_hashes, request.num_tokens)
        self._tables[request.request_id] = table
        request.state = RequestState.RUNNING
        request.num_computed_tokens = match.num_blocks * self._kv.layout.block_size
        if request.num_preemptions == 0:
            request.num_cached_tokens = request.num_computed_tokens
            self.counters.num_prompt_tokens += request.num_prompt_tokens
            self.counters.num_cached_prompt_tokens += request.num_cached_tokens
        insort(self._running, request, key=_order)
        return True

    def _remove(self, request: Request) -> None:
        was_waiting = request.state is RequestState.WAITING
        if request.state is RequestState.RUNNING:
            self._release(request)
        request.state = RequestState.FINISHED
        if was_waiting:
            self._waiting.forget(request)
        del self._requests[request.request_id]

    def _release(self, request: Request) -> None:
        self._kv.close(request.request_id)
        del self._tables[request.request_id]
        self._running.remove(request)
        self._released.append(request.request_id)


class _StepPlan:
    """The step under construction: what is scheduled so far and the budget left."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.scheduled: dict[str, ScheduledRequest] = {}

    def add(self, item: ScheduledRequest) -> None:
        self.scheduled[item.request.request_id] = item
        self.budget -= item.num_tokens

    def drop(self, request: Request) -> None:
        item = self.scheduled.pop(request.request_id, None)
        if item is not None:
            self.budget += item.num_tokens


def _order(request: Request) -> tuple[int, int]:
    return request.order


def _has_any_block(request: Request, blocks: set[tuple[int, bytes]]) -> bool:
    """Whether its chain has one of these (index, hash) blocks, and may share it: spares the search for its prefix."""
    hashes = request.block_hashes
    return not _needs_whole_prompt(request) and any(
        index < len(hashes) and hashes[index] == block_hash for index, block_hash in blocks
    )


def _needs_whole_prompt(request: Request) -> bool:
    """Prompt logprobs need the logits of every prompt position, so cached positions must be computed again."""
    return request.params.prompt_logprobs is not None and request.num_output_tokens == 0
