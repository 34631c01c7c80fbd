"""Scheduler: every step moves request cursors toward the ends of their token lists, within one token budget.

Running decodes come first, so a long prompt never stalls them; then prompts in progress; then waiting requests while
blocks last. When blocks run out, the least urgent running request (priority, then age: `WaitingQueue`) is preempted:
its cursor is reset and it waits again. The most urgent request can always advance, so every request ends. A *fetching*
one has its blocks and waits for their KV from another worker; it is never preempted, since it would lose what is in
transit. Drafts get the budget and the blocks that all others have left. Lease and reservation are defined in `sharing`.
"""

from bisect import insort
from collections.abc import Callable, Iterable, Iterator

from tandem.core.chain_hasher import ChainHasher
from tandem.core.config import SchedulerConfig
from tandem.core.errors import CapacityError, InvalidRequestError
from tandem.core.types import FinishReason
from tandem.kvcache.block_table import BlockTable
from tandem.kvcache.checkpoints import checkpoint_blocks
from tandem.kvcache.manager import KVCacheManager
from tandem.kvcache.prefix import PrefixMatch
from tandem.scheduler.admission import find_prefix, has_room_for, refuse_impossible
from tandem.scheduler.awaited_blocks import AwaitedBlocks
from tandem.scheduler.counters import SchedulerCounters
from tandem.scheduler.drafting import Drafting
from tandem.scheduler.output import ExecutorOutput, KVEvent, SampledToken, SchedulerOutput
from tandem.scheduler.queue import WaitingQueue
from tandem.scheduler.request import Request, RequestState
from tandem.scheduler.sharing import KVSharing
from tandem.scheduler.step_deltas import StepDeltas
from tandem.scheduler.step_plan import StepPlan

_MAX_PASSED = 32  # waiting requests that a full step looks past


class Scheduler:
    """Decides each step's work: call `schedule`, execute its output, call `update`; other methods also in between."""

    def __init__(self, config: SchedulerConfig, kv: KVCacheManager) -> None:
        assert kv.max_chunk_tokens >= config.max_num_batched_tokens, "block accounting expects smaller chunks"
        self.config = config
        self.counters = SchedulerCounters()
        self._kv = kv
        self._sharing = KVSharing(kv)
        self._drafting = Drafting(kv, self.counters)
        self._hasher = ChainHasher()
        self._deltas = StepDeltas(kv.pages_of)
        self._requests: dict[str, Request] = {}
        self._tables: dict[str, BlockTable] = {}
        self._waiting = WaitingQueue()
        self._running: list[Request] = []
        self._expecting: set[str] = set()  # waiting requests whose KV comes from elsewhere
        self._fetching: dict[str, int] = {}  # tokens held when the rest was reserved, by request
        self._failed: list[Request] = []
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

    @property
    def requests(self) -> Iterable[Request]:
        return self._requests.values()

    def get(self, request_id: str) -> Request | None:
        return self._requests.get(request_id)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            InvalidRequestError: it could never run, or its id is in use.
            CapacityError: the queue is full.
        """
        if request.request_id in self._requests:
            raise InvalidRequestError(f"request_id={request.request_id!r} is in use; ids of live requests are unique")
        refuse_impossible(request, self.config.max_model_len, self._kv)
        if len(self._waiting) >= self.config.max_num_waiting:
            raise CapacityError(f"{len(self._waiting)} requests are waiting, the most allowed; try again later")
        request.order = (request.priority * self.config.aging_steps + self._step, self._num_added)
        request.block_hashes = self._hasher.hashes(request.hash_root, request.token_ids, self._kv.layout.block_size)
        self._num_added += 1
        self._requests[request.request_id] = request
        self._waiting.push(request)
        if request.num_expected_tokens:
            self._expecting.add(request.request_id)

    def finish(self, request_id: str, reason: FinishReason, stop_reason: int | str | None = None) -> Request | None:
        """End a request in any state and release its blocks. Returns None if there is no such request."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        request.finish_reason, request.stop_reason = reason, stop_reason
        self._remove(request)
        return request

    def take_token(self, request_id: str, token_id: int) -> Request | None:
        """Append a request's next token, sampled by the worker that computes its KV. Returns None if the token is not
        used: the request has ended, or computes its own tokens by now.
        """
        request = self._requests.get(request_id)
        if request is None or request.num_computed_tokens or request.num_output_tokens > request.num_resumed_tokens:
            return None
        request.append(token_id)
        request.extend_hashes(self._kv.layout.block_size)
        if request.finish_reason is not None:
            self._remove(request)
        return request

    def note_kv_offered(self, request_id: str, num_tokens: int) -> None:
        """Record that the worker computing the request's KV offers it: KV of the first `num_tokens` tokens has arrived,
        and more will follow. Other requests may share what has arrived. The request no longer waits for other KV, since
        its lease occupies blocks on that worker which a request it waits for might need.
        """
        request = self._requests.get(request_id)
        if request is None:
            return
        request.is_offered, request.awaited_hash = True, None
        if request.state is RequestState.WAITING_FOR_KV:
            self._kv.commit(request_id, request.block_hashes, min(num_tokens, request.num_tokens - 1))

    def note_kv_ended(self, request_id: str, num_tokens: int) -> None:
        """Record that KV of the first `num_tokens` tokens has arrived and no more will follow. The request then runs.
        If
        less arrived than expected, it is queued again: it finds what arrived in the prefix cache and computes the rest;
        so too if KV of all its tokens arrived and state cannot be rewound to compute the last one for its logits.
        """
        request = self._requests.get(request_id)
        if request is None or request.state is RequestState.RUNNING:
            return
        expected = request.num_expected_tokens
        if num_tokens >= expected:
            self._take_arrived(request)
        request.num_expected_tokens, request.awaited_hash = 0, None
        self._expecting.discard(request_id)
        if request.state is RequestState.WAITING:
            return
        num_held_tokens = self._fetching.pop(request_id)
        usable = min(num_tokens, request.num_tokens - 1)
        self._kv.commit(request_id, request.block_hashes, usable)
        # NOTE: without the token that follows, the last position must be computed again, for its logits
        is_past = usable < num_tokens and not self._kv.layout.can_rewind
        if num_tokens < expected or is_past:
            self._take_blocks(request)
            request.state = RequestState.WAITING
            self._waiting.push(request)
            return
        self.counters.num_fetched_tokens += usable - num_held_tokens
        request.num_computed_tokens = usable
        request.state = RequestState.RUNNING
        insort(self._running, request, key=_order)
        self._sharing.note_computed(request)

    def take_kv_events(self) -> list[KVEvent]:
        """Returns the events of reserved and of leased blocks since the last call, in order."""
        return self._sharing.take_kv_events()

    def take_failed(self) -> list[Request]:
        """Requests that `schedule` ended with an error: it lacked blocks, and preempting leased ones frees none."""
        failed, self._failed = self._failed, []
        return failed

    def schedule(self) -> SchedulerOutput:
        """Choose this step's work. Empty only if no request can advance; `released` is then left to the next output."""
        self._step += 1
        plan = StepPlan(self.config.max_num_batched_tokens)
        num_preempted = self.counters.num_preemptions
        for request in self._catch_up_order():
            self._advance(request, plan)
        # NOTE: blocks of preempted requests are for those that pushed them out; if none is left, for who waits
        if self.counters.num_preemptions == num_preempted or not plan.shares:
            self._admit(plan)
        self._drafting.add(plan)
        if not plan.shares:
            return SchedulerOutput((), (), ())
        released, self._released = tuple(self._released), []
        deltas, tables = self._deltas, self._tables
        scheduled = [
            deltas.schedule(request, num_tokens, tables[request_id])
            for request_id, (request, num_tokens) in plan.shares.items()
        ]
        return SchedulerOutput(deltas.take_new(), tuple(scheduled), released)

    def update(
        self,
        output: SchedulerOutput,
        result: ExecutorOutput,
        on_token: Callable[[Request, SampledToken], None] | None = None,
    ) -> list[Request]:
        """Move the cursors as planned by `output` and append the sampled tokens; returns the requests that ended.

        on_token: called in this call after each token. If it ends the request, the tokens after that one are dropped.
        """
        ended = []
        self._drafting.note_step(result)
        for item in output.scheduled:
            request = self._requests.get(item.request_id)
            if request is None or request.state is not RequestState.RUNNING:
                continue
            request.num_computed_tokens = item.end - item.num_drafts
            request.draft_token_ids = ()
            sampled = result.sampled.get(request.request_id)
            if sampled is None:
                self._note_computed(request)
                assert request.num_pending_tokens, f"{request.request_id} was to get a token and got none"
                continue
            assert not request.num_pending_tokens, f"{request.request_id} got a token before its prompt was computed"
            self._drafting.note_sampled(request, item, len(sampled), result.draft_times)
            for token in sampled:
                # NOTE: all tokens of the list have KV here; that of a draft that was right has been computed as well
                request.num_computed_tokens = request.num_tokens
                self._take_sampled(request, token)
                if on_token is not None:
                    on_token(request, token)
                if request.finish_reason is not None:
                    ended.append(request)
                    break
        self._drafting.replace(self._requests, result.drafts)
        return ended

    def _take_sampled(self, request: Request, sampled: SampledToken) -> None:
        if sampled.error is None:  # NOTE: KV of a failed request must not enter the prefix cache
            self._note_computed(request)
        request.take(sampled)
        request.extend_hashes(self._kv.layout.block_size)
        if request.finish_reason is not None:
            self._remove(request)

    def _note_computed(self, request: Request) -> None:
        self._kv.commit(request.request_id, request.block_hashes, request.num_computed_tokens)
        self._sharing.note_computed(request)

    def check(self) -> None:
        """Check that exactly the running and fetching requests own blocks, and that the block accounting holds.

        Raises:
            AssertionError: an invariant is violated; the message names it.
        """
        self._kv.check()
        running = {request.request_id for request in self._running}
        assert running | set(self._fetching) == set(self._tables), "a request owns blocks without a use, or lacks them"
        num_known = len(self._running) + len(self._fetching) + len(self._waiting)
        assert num_known == len(self._requests), "a request is lost"
        assert self._deltas.request_ids <= running, "the executor keeps what has been released"
        expecting = {r.request_id for r in self._requests.values() if r.num_expected_tokens}
        assert self._expecting == expecting - set(self._fetching), "who waits for KV is miscounted"
        if not self._requests:
            assert self._kv.usage.used == 0, f"{self._kv.usage.used} blocks are used by no request"

    def _catch_up_order(self) -> Iterator[Request]:
        """Running requests, decodes first, each kind in order of urgency; skips those preempted during iteration."""
        decoding: list[Request] = []
        prefilling: list[Request] = []
        for request in self._running:
            (decoding if request.is_decoding else prefilling).append(request)
        for request in decoding + prefilling:
            if request.state is RequestState.RUNNING:
                yield request

    def _advance(self, request: Request, plan: StepPlan) -> None:
        count = min(request.num_pending_tokens, plan.budget)
        if count == 0:
            return
        computed = request.num_computed_tokens
        while not self._kv.grow(request.request_id, computed, computed + count):
            if self._kv.make_room_to_grow(request.request_id, computed + count):
                continue
            victim = self._running[-1]
            plan.drop(victim)
            self._preempt(victim)
            if victim is request:
                return
        plan.add(request, count)

    def _preempt(self, request: Request) -> None:
        """Queue a running request again. NOTE: a leased one ends with an error instead: its blocks stay allocated, so
        two such requests could wait for each other.
        """
        if request.handoff.lease_id is not None:
            request.finish_reason, request.stop_reason = FinishReason.ERROR, "its blocks were needed by others"
            self._remove(request)
            self._failed.append(request)
            return
        self._release(request)
        request.num_computed_tokens, request.draft_token_ids = 0, ()
        request.num_preemptions += 1
        request.state = RequestState.WAITING
        self.counters.num_preemptions += 1
        self._waiting.push(request)

    def _admit(self, plan: StepPlan) -> None:
        """Start waiting requests in order. One that lacks blocks holds back those behind it, so that it cannot starve;
        one that gains from blocks another request is about to complete is passed over until they can be shared. In a
        step without budget, only requests whose KV comes from other workers start.
        """
        aside: list[Request] = []
        awaited = AwaitedBlocks(self._kv)
        while len(self._running) + len(self._fetching) < self.config.max_num_running:
            if not plan.budget and (len(aside) >= _MAX_PASSED or not self._expecting):
                break
            request = self._waiting.pop()
            if request is None:
                break
            if awaited.still_waits(request):
                aside.append(request)
                continue
            if not plan.budget and not request.num_expected_tokens:
                aside.append(request)
                if not has_room_for(request, self._kv):
                    break
                continue
            match = find_prefix(request, self._kv)
            if awaited.waits(request, match):
                aside.append(request)
            elif not self._start(request, match):
                aside.append(request)
                break
            elif request.state is RequestState.RUNNING:
                self._advance(request, plan)
        for request in aside:
            self._waiting.push(request)

    def _start(self, request: Request, match: PrefixMatch) -> bool:
        if not (self._kv.can_admit(match, request.num_tokens) or self._kv.make_room(match, request.num_tokens)):
            return False
        num_held_tokens = match.num_blocks * self._kv.layout.block_size
        self._expecting.discard(request.request_id)
        is_fetched = request.num_expected_tokens > num_held_tokens
        is_coming = is_fetched and request.is_computed_elsewhere
        breakpoints = (pin.num_tokens for pin in request.pins)
        checkpoints = checkpoint_blocks(request.num_prompt_tokens, breakpoints, self._kv.layout.block_size)
        hashes, num_tokens = request.block_hashes, request.num_tokens
        table = self._kv.admit(
            request.request_id, match, hashes, num_tokens, is_coming=is_coming, checkpoints=checkpoints
        )
        self._tables[request.request_id] = table
        if not request.was_admitted:
            request.was_admitted = True
            # NOTE: a request resumed here may find output tokens in the cache too
            request.num_cached_tokens = min(num_held_tokens, request.num_prompt_tokens)
            self.counters.num_prompt_tokens += request.num_prompt_tokens
            self.counters.num_cached_prompt_tokens += request.num_cached_tokens
        if is_fetched:
            request.state = RequestState.WAITING_FOR_KV
            self._fetching[request.request_id] = num_held_tokens
            self._sharing.reserve(request, num_held_tokens, match.more)
            return True
        if request.num_expected_tokens:
            self._sharing.reserve_nothing(request, num_held_tokens)
            self._take_arrived(request)
        request.state = RequestState.RUNNING
        request.num_computed_tokens = num_held_tokens
        insort(self._running, request, key=_order)
        self._sharing.note_computed(request)
        return True

    def _take_arrived(self, request: Request) -> None:
        """Record that all expected KV is present. If another worker computed all tokens, that worker keeps the pins."""
        if request.is_computed_elsewhere:
            request.pins = ()
        request.num_expected_tokens = 0

    def _remove(self, request: Request) -> None:
        was_waiting = request.state is RequestState.WAITING
        if request.state is RequestState.RUNNING:
            self._release(request)
        elif request.state is RequestState.WAITING_FOR_KV:
            del self._fetching[request.request_id]
            self._take_blocks(request)
        request.state = RequestState.FINISHED
        if was_waiting:
            self._waiting.forget(request)
            self._expecting.discard(request.request_id)
        del self._requests[request.request_id]

    def _release(self, request: Request) -> None:
        self._take_blocks(request)
        self._running.remove(request)
        self._deltas.forget(request.request_id)
        self._released.append(request.request_id)

    def _take_blocks(self, request: Request) -> None:
        self._kv.release(request.request_id)
        del self._tables[request.request_id]


def _order(request: Request) -> tuple[int, int]:
    return request.order
