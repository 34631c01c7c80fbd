"""The engine: queues requests and computes them step by step (schedule → execute → update → emit outputs).

One synchronous thread owns an engine. It holds no module-level state, so several can live in one process.
"""

import random
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tandem.core.clock import Clock, SystemClock
from tandem.core.config import SchedulerConfig
from tandem.core.errors import InvalidRequestError, RanksLostError, TandemError
from tandem.core.hashing import root_hash
from tandem.core.output import RequestOutput
from tandem.core.sampling_params import SamplingParams
from tandem.core.scope import UNSCOPED, CacheScope
from tandem.core.types import FinishReason, TokenLogprobs
from tandem.engine.choice import Choice
from tandem.engine.drafts.hand_over import DraftHandOver
from tandem.engine.executor import Executor
from tandem.engine.identity import ModelIdentity
from tandem.engine.load import EngineLoad, StepLog, StepStats, load_of, stats_of
from tandem.engine.randomness import choice_seed
from tandem.engine.text_stream import TextStream
from tandem.engine.validation import (
    check_drafter,
    check_handoff,
    check_params,
    check_request_id,
    check_scope,
    encode_prompt,
)
from tandem.kvcache.manager import KVCacheManager
from tandem.kvcache.usage import KVCacheUsage
from tandem.scheduler.counters import SchedulerCounters
from tandem.scheduler.output import KVEvent, KVReserved, SampledToken, ScheduledRequest, SchedulerOutput
from tandem.scheduler.request import WHOLE, Handoff, Request
from tandem.scheduler.scheduler import Scheduler
from tandem.text.grammars import Grammars
from tandem.text.tokenizer import Tokenizer


class Engine:
    """Serves requests from one model.

    Args:
        executor: computes steps.
        scheduler: decides them.
        kv: block accounting, shared with the scheduler.
        model: identity of what the executor computes.
        tokenizer: None serves token ids only (no text prompts, no stop strings).
        grammars: what answers can be held to; None = to nothing.
        seed: from which requests without a seed draw theirs.
        clock: for metrics, and for how long pins last; nothing else is decided by it.

    `on_close` ends what the executor runs beside this thread.
    `on_ranks_lost` gives the executor ranks again after a step that ended with `RanksLostError`; None = it has none.
    `borrowed_s` returns how long cores lent by other workers have computed for this engine, as time of all its own.
    `on_kv_event` is called, on the thread that steps, with each reservation and lease of KV for other workers.
    `draft_states` moves states of the drafter between workers; None = there are none to move.
    `step_log` has the cost of the latest steps.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        kv: KVCacheManager,
        model: ModelIdentity,
        *,
        tokenizer: Tokenizer | None = None,
        grammars: Grammars | None = None,
        seed: int = 0,
        clock: Clock | None = None,
        on_close: Callable[[], None] | None = None,
        on_ranks_lost: Callable[[], None] | None = None,
    ) -> None:
        self._executor = executor
        self._scheduler = scheduler
        self._kv = kv
        self._model = model
        self._clock = clock or SystemClock()
        self._random = random.Random(seed)
        self._choices: dict[str, Choice] = {}
        self._children: dict[str, list[str]] = {}
        self._num_numbered = 0
        self._on_close = on_close
        self._on_ranks_lost = on_ranks_lost
        self.tokenizer = tokenizer
        self.grammars = grammars
        self.borrowed_s: Callable[[], float] = lambda: 0.0
        self.on_kv_event: Callable[[KVEvent], None] | None = None
        self.draft_states: DraftHandOver | None = None
        self.step_log = StepLog()
        self.is_stalled = False

    @property
    def model(self) -> ModelIdentity:
        return self._model

    @property
    def kv(self) -> KVCacheManager:
        """Block accounting, for leases and holds. Only the engine's thread may use it."""
        return self._kv

    @property
    def limits(self) -> SchedulerConfig:
        return self._scheduler.config

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    @property
    def sampling_defaults(self) -> Mapping[str, Any]:
        return self._model.sampling_defaults

    @property
    def kv_usage(self) -> KVCacheUsage:
        return self._kv.usage

    @property
    def counters(self) -> SchedulerCounters:
        return self._scheduler.counters

    @property
    def num_running(self) -> int:
        return self._scheduler.num_running

    @property
    def num_waiting(self) -> int:
        return self._scheduler.num_waiting

    def add_request(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        scope: CacheScope = UNSCOPED,
        handoff: Handoff = WHOLE,
    ) -> str:
        """Queue a prompt (text or token ids); returns its id.

        Args:
            prompt: text, encoded with the tokenizer's special tokens, or token ids taken as they are.
            params: how tokens are chosen. `n` > 1 gives that many outputs, told apart by `RequestOutput.index`.
            request_id: unique among live requests; None = numbered.
            priority: lower is more urgent; waiting makes any request more urgent over time.
            scope: requests share cached blocks only with requests of an equal scope.
            handoff: what other workers do of it.

        Raises:
            InvalidRequestError: naming what is wrong with it.
            CapacityError: when the queue is full.
        """
        arrival_s = self._clock.now_s()
        request_id = self._unused_id() if request_id is None else request_id
        check_request_id(request_id)
        check_scope(scope)
        if request_id in self._children:
            raise InvalidRequestError(f"request_id={request_id!r} is in use; ids of live requests are unique")
        grammar = check_params(params, self.tokenizer, self._model.vocab_size, self.grammars)
        check_handoff(handoff, params, self._model.vocab_size)
        check_drafter(params, handoff, self._model.drafter)
        token_ids = self.encode(prompt)
        requests = self._requests(request_id, token_ids, params, priority, self._root_hash(scope), handoff)
        self._add_all(requests)
        self._children[request_id] = [request.request_id for request in requests]
        for index, request in enumerate(requests):
            text = self._text_stream(token_ids, params, handoff)
            self._choices[request.request_id] = Choice(request_id, index, request, text, arrival_s, grammar)
        return request_id

    def encode(self, prompt: str | Sequence[int]) -> "array[int]":
        """The token ids that `add_request` makes of a prompt. Any thread may call it.

        Raises:
            InvalidRequestError: as `add_request`, where the prompt is at fault.
        """
        return encode_prompt(prompt, self.tokenizer, self._model.vocab_size, self._scheduler.config.max_model_len)

    def close(self) -> None:
        """End the engine's other threads and processes. No step may follow."""
        if self._on_close is not None:
            self._on_close()
        if self.grammars is not None:
            self.grammars.close()

    def recover(self, lost: RanksLostError) -> None:
        """Continue with new ranks after `lost`, which a step raised; all requests must have been aborted. What is
        cached stays.

        Raises:
            TandemError: ranks cannot be replaced; `lost` itself if nothing can replace them.
        """
        if self._on_ranks_lost is None:
            raise lost
        assert not self._choices, "nobody knows how far the lost step came"
        self._on_ranks_lost()

    def knows(self, request_id: str) -> bool:
        """Whether any choice of this request is unfinished."""
        return request_id in self._children

    def abort(self, request_id: str) -> list[RequestOutput]:
        """End a request and free what it holds. Returns its last outputs; none if it is unknown or has ended."""
        outputs = []
        for child_id in list(self._children.get(request_id, ())):
            self._scheduler.finish(child_id, FinishReason.ABORT)
            outputs.append(self._output(self._choices[child_id], (), "", None))
        return outputs

    def step(self) -> list[RequestOutput]:
        """Compute one step; returns new outputs. At once, setting `is_stalled`, if no request can advance."""
        self._kv.pinned.tell_time(self._clock.now_s())
        step = self._scheduler.schedule()
        self._pass_on_events()
        outputs = self._ended(self._scheduler.take_failed())
        self.is_stalled = not step.scheduled
        if self.is_stalled:
            return outputs
        stats = stats_of(step, self._note_scheduled(step), self._model.read_bytes)
        self.counters.read_bytes += stats.read_bytes
        started_s = self._clock.now_s() + self.borrowed_s()
        result = self._executor.submit(step).result()
        if result.prompt_logprobs:
            for item in step.scheduled:
                self._note_prompt_logprobs(item, result.prompt_logprobs.get(item.request_id))
        now_s = self._clock.now_s()
        duration_s = now_s + self.borrowed_s() - started_s
        self.step_log.note(replace(stats, num_accepted=result.num_accepted, duration_s=duration_s))
        self._scheduler.update(
            step, result, lambda request, token: outputs.append(self._take_token(request, token, now_s))
        )
        self._pass_on_events()
        return outputs

    def accept_token(self, request_id: str, token: SampledToken) -> list[RequestOutput]:
        """Take a request's next token, sampled by the worker that computes its KV. Returns no output if the request
        does not want it or the model has no such token.
        """
        if not 0 <= token.token_id < self._model.vocab_size:
            return []
        request = self._scheduler.take_token(request_id, token.token_id)
        return [] if request is None else [self._take_token(request, token, self._clock.now_s())]

    def note_kv_offered(self, request_id: str, num_tokens: int) -> None:
        """Note that KV of the first `num_tokens` tokens has arrived and more follows (`Scheduler.note_kv_offered`)."""
        self._scheduler.note_kv_offered(request_id, num_tokens)

    def note_kv_ended(self, request_id: str, num_tokens: int) -> None:
        """Note that KV of the first `num_tokens` tokens has arrived and no more follows (`Scheduler.note_kv_ended`)."""
        self._scheduler.note_kv_ended(request_id, num_tokens)
        self._pass_on_events()

    def load(self) -> EngineLoad:
        """Counts of the requests that were accepted and have not finished, and of the KV they hold."""
        return load_of(self._scheduler.requests, self._kv)

    def take_step_stats(self) -> list[StepStats]:
        """The work and duration of the steps since the last call; see `StepLog`."""
        return self.step_log.take()

    def check(self) -> None:
        """Check that every block, request and choice is accounted for.

        Raises:
            AssertionError: naming what is wrong.
        """
        self._scheduler.check()
        assert all(self._scheduler.get(child_id) is not None for child_id in self._choices), "a choice has no request"
        assert set(self._choices) == {child for children in self._children.values() for child in children}

    def _unused_id(self) -> str:
        """A new request id, not in use by any caller."""
        while (request_id := f"request-{self._num_numbered}") in self._children:
            self._num_numbered += 1
        self._num_numbered += 1
        return request_id

    def _root_hash(self, scope: CacheScope) -> bytes:
        return root_hash(scope, model_fingerprint=self._model.fingerprint, block_size=self._kv.layout.block_size)

    def _requests(
        self,
        request_id: str,
        token_ids: Sequence[int],
        params: SamplingParams,
        priority: int,
        hash_root: bytes,
        handoff: Handoff,
    ) -> list[Request]:
        room = self._scheduler.config.max_model_len - len(token_ids)
        max_tokens = room if params.max_tokens is None else params.max_tokens
        if handoff.num_new_tokens is not None:
            max_tokens = min(max_tokens, len(handoff.output_token_ids) + handoff.num_new_tokens)
        seed = params.seed if params.seed is not None else self._random.getrandbits(63)
        return [
            Request(
                request_id=request_id if params.n == 1 else f"{request_id}#{index}",
                prompt_token_ids=token_ids,
                params=params if index == 0 else replace(params, prompt_logprobs=None),
                seed=choice_seed(seed, index),
                hash_root=hash_root,
                eos_token_ids=frozenset(self._model.eos_token_ids),
                max_tokens=max_tokens,
                priority=priority,
                handoff=handoff,
            )
            for index in range(params.n)
        ]

    def _text_stream(self, token_ids: Sequence[int], params: SamplingParams, handoff: Handoff) -> TextStream | None:
        """A request's text stream, past the output that other workers have emitted already."""
        if self.tokenizer is None:
            return None
        text = TextStream(self.tokenizer, token_ids, params)
        for token_id in handoff.output_token_ids:
            text.add(token_id)
        return text

    def _ended(self, requests: Iterable[Request]) -> list[RequestOutput]:
        return [self._output(self._choices[request.request_id], (), "", None) for request in requests]

    def _pass_on_events(self) -> None:
        for event in self._scheduler.take_kv_events():
            if isinstance(event, KVReserved):
                self._note_started([self._choices[event.request_id]])  # NOTE: it queues no longer, it waits for its KV
            if self.on_kv_event is not None:
                self.on_kv_event(event)

    def _add_all(self, requests: list[Request]) -> None:
        """Queue all choices of a request or none of them."""
        if len(requests) > self._scheduler.config.max_num_waiting:
            raise InvalidRequestError(
                f"n={len(requests)} exceeds max_num_waiting={self._scheduler.config.max_num_waiting} of this engine"
            )
        for index, request in enumerate(requests):
            try:
                self._scheduler.add(request)
            except TandemError:
                for added in requests[:index]:
                    self._scheduler.finish(added.request_id, FinishReason.ABORT)
                raise

    def _note_scheduled(self, step: SchedulerOutput) -> list[Request]:
        """Note that these requests have left the queue; returns them."""
        choices = [self._choices[item.request_id] for item in step.scheduled]
        self._note_started(choices)
        return [choice.request for choice in choices]

    def _note_started(self, choices: Iterable[Choice]) -> None:
        now_s = self._clock.now_s()
        for choice in choices:
            if choice.first_scheduled_s is None:
                choice.first_scheduled_s = now_s

    def _note_prompt_logprobs(self, item: ScheduledRequest, entries: tuple[TokenLogprobs, ...] | None) -> None:
        """Store a chunk's entries. A preempted prompt starts over, so entries after the cursor are replaced."""
        if entries:
            self._choices[item.request_id].prompt_logprobs[item.start :] = entries

    def _take_token(self, request: Request, token: SampledToken, now_s: float) -> RequestOutput:
        """Turn a chosen token into an update for the caller, matching stop strings on the way."""
        choice = self._choices[request.request_id]
        if token.error is not None:
            return self._output(choice, (), "", None)
        if token.ends:
            return self._output(choice, (), "" if choice.text is None else choice.text.flush().text, None)
        choice.note_token(now_s)
        piece = choice.text_piece(token.token_id)
        if piece.matched is not None:
            if request.finish_reason is None:
                self._scheduler.finish(request.request_id, FinishReason.STOP, piece.matched)
            else:
                request.finish_reason, request.stop_reason = FinishReason.STOP, piece.matched
        return self._output(choice, (token.token_id,), piece.text, token.logprobs)

    def _output(
        self, choice: Choice, token_ids: tuple[int, ...], text: str, logprobs: TokenLogprobs | None
    ) -> RequestOutput:
        output = choice.output(token_ids, text, logprobs)
        if output.finish_reason is not None:
            self._forget(choice)
        return output

    def _forget(self, choice: Choice) -> None:
        del self._choices[choice.request.request_id]
        children = self._children[choice.parent_id]
        children.remove(choice.request.request_id)
        if not children:
            del self._children[choice.parent_id]
