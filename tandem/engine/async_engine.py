"""An engine for asyncio callers: one thread runs the loop, one queue goes in, one queue per request comes out.

The thread alone touches the engine. A caller that stops iterating, for whatever reason, aborts its request.
"""

import asyncio
import queue
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

from tandem.core.errors import (
    EngineStoppedError,
    InvalidRequestError,
    RanksLostError,
    TandemError,
    WorkerLostError,
    shown,
)
from tandem.core.machine import monotonic_s
from tandem.core.output import RequestOutput
from tandem.core.sampling_params import SamplingParams
from tandem.core.scope import UNSCOPED, CacheScope
from tandem.engine.engine import Engine
from tandem.scheduler.output import KVComputed, KVEvent, KVReserved, SampledToken
from tandem.scheduler.request import WHOLE, Handoff
from tandem.text.grammars import CompiledGrammar

_STOP: Final = None
_LONG_TEXT: Final = 2048  # characters; encoding more, about a millisecond, must not hold up the engine's steps
EngineUpdate = RequestOutput | KVReserved | KVComputed
_Update = EngineUpdate | TandemError
_Result = TypeVar("_Result")


@dataclass(slots=True)
class _Stream:
    """One caller's request; its updates are put into `updates` on its own event loop. `request_id`: None = the engine
    has not taken it yet. `grammar` is held until then.
    """

    loop: asyncio.AbstractEventLoop
    updates: asyncio.Queue[_Update]
    num_unfinished: int
    grammar: CompiledGrammar | None
    request_id: str | None = None
    is_abandoned: bool = False


class AsyncEngine:
    """Runs an `Engine` on a thread of its own.

    Use as `async with AsyncEngine(engine) as serving: async for output in serving.generate(...)`. Its thread calls
    `on_busy` with False before it waits for work and with True when there is some again, and `on_recovering` with True
    when ranks (processes that compute the model together) were lost and with False when they were replaced. All streams
    open at a loss end with `WorkerLostError`.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        engine.on_kv_event = self._pass_on
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._streams: dict[str, _Stream] = {}
        self._failure: str | None = "the engine has not been started"
        self._was_started = False
        self._busy_since_s: float | None = None
        self.on_busy: Callable[[bool], None] | None = None
        self.on_recovering: Callable[[bool], None] | None = None
        self._thread = threading.Thread(target=self._run, name="tandem-engine", daemon=True)
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="tandem-grammars")

    async def __aenter__(self) -> "AsyncEngine":
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.stop)

    def start(self) -> None:
        """Start the loop. Once in an engine's life: EngineStoppedError afterwards."""
        if self._was_started:
            raise EngineStoppedError("this engine was started before; build another one")
        self._was_started = True
        self._failure = None
        self._thread.start()

    def stop(self) -> None:
        """End every request with `EngineStoppedError` and wait for the loop to end. Harmless when it is not running."""
        if self._was_started:
            self._inbox.put(_STOP)
            self._thread.join()
            self._engine.close()
            self._compiler.shutdown()

    def busy_s(self) -> float:
        """Seconds since the thread began its present turn (callers' actions, then a step). 0 while it waits."""
        since_s = self._busy_since_s
        return 0.0 if since_s is None else monotonic_s() - since_s

    async def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        scope: CacheScope = UNSCOPED,
    ) -> AsyncIterator[RequestOutput]:
        """Serve one request; see `Engine.add_request` for the arguments.

        Raises:
            InvalidRequestError, CapacityError: as `Engine.add_request`.
            EngineStoppedError: when the engine stops or fails before the request ends.
        """
        updates = self.stream(prompt, params, request_id=request_id, priority=priority, scope=scope)
        try:
            async for item in updates:
                if isinstance(item, RequestOutput):
                    yield item
        finally:
            await updates.aclose()

    async def stream(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        scope: CacheScope = UNSCOPED,
        handoff: Handoff = WHOLE,
        on_queued: Callable[[], object] | None = None,
    ) -> AsyncGenerator[EngineUpdate, None]:
        """Like `generate`, for a request whose work is split between workers: also yields `KVReserved` and `KVComputed`
        events.

        Who gets a `KVReserved` drops its hold when nothing writes there any more; one that nobody gets is dropped here.
        `on_queued` is called in this coroutine once the request is queued: what is posted of it before comes too early.
        """
        self._require_running()
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError(f"params={shown(params)} must be a SamplingParams")
        if isinstance(prompt, str) and len(prompt) > _LONG_TEXT:
            prompt = await asyncio.to_thread(self._engine.encode, prompt)
        grammar = await self._compiled(params)
        stream = _Stream(asyncio.get_running_loop(), asyncio.Queue(), params.n, grammar)

        def add() -> None:
            self._add(stream, prompt, params, request_id, priority, scope, handoff)

        self._inbox.put(add)
        self._require_running()
        if on_queued is not None:
            on_queued()
        try:
            while stream.num_unfinished:
                update = await stream.updates.get()
                if isinstance(update, TandemError):
                    stream.num_unfinished = 0
                    raise update
                stream.num_unfinished -= isinstance(update, RequestOutput) and update.finished
                yield update
        finally:
            stream.is_abandoned = True
            while not stream.updates.empty():
                self._drop_reservation(stream.updates.get_nowait())
            if stream.num_unfinished:
                self._inbox.put(lambda: self._abort(stream))

    async def _compiled(self, params: SamplingParams) -> CompiledGrammar | None:
        """Have a new grammar compiled before its request is queued: neither the steps nor the caller's loop wait."""
        grammars = self._engine.grammars
        if params.grammar is None or grammars is None:
            return None
        known = grammars.known(params.grammar)
        if known is not None:
            return known
        try:
            compiled = self._compiler.submit(grammars.compiled, params.grammar)
        except RuntimeError as error:  # the thread has ended
            raise EngineStoppedError("the engine was stopped") from error
        return await asyncio.wrap_future(compiled)

    def post(self, action: Callable[[Engine], None]) -> None:
        """Call `action` with the engine, on its thread, between two steps; returns at once. Any thread may call. The
        action is dropped if the engine has stopped; it must not raise, which would end the engine.
        """

        def act() -> None:
            if self._failure is None:
                action(self._engine)

        self._inbox.put(act)

    async def call(self, action: Callable[[Engine], _Result]) -> _Result:
        """Call `action` with the engine, on its thread, between two steps; waits, and returns what it returned.

        Raises:
            EngineStoppedError: the engine has stopped.
            TandemError: `action` raised it. Any other error of `action` ends the engine.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[_Result] = loop.create_future()

        def act() -> None:
            try:
                if self._failure is not None:
                    raise EngineStoppedError(self._failure)
                answer = partial(_resolve, future, action(self._engine))
            except TandemError as error:
                answer = partial(_reject, future, error)
            _call_soon(loop, answer)

        self._require_running()
        self._inbox.put(act)
        self._require_running()
        return await future

    def accept_token(self, request_id: str, token: SampledToken) -> None:
        """Add a token that another worker sampled (`Engine.accept_token`); its output goes to the request's stream."""
        self.post(lambda engine: self._dispatch(engine.accept_token(request_id, token)))

    def note_kv_offered(self, request_id: str, num_tokens: int) -> None:
        """Note that KV of the first `num_tokens` tokens has arrived and more follows (`Scheduler.note_kv_offered`)."""
        self.post(lambda engine: engine.note_kv_offered(request_id, num_tokens))

    def note_kv_ended(self, request_id: str, num_tokens: int) -> None:
        """Note that KV of the first `num_tokens` tokens has arrived and no more follows (`Scheduler.note_kv_ended`)."""
        self.post(lambda engine: engine.note_kv_ended(request_id, num_tokens))

    def _pass_on(self, event: KVEvent) -> None:
        if isinstance(event, KVComputed) and event.is_last and self._engine.draft_states is not None:
            # NOTE: done before the next step, in which the drafter forgets the request, and after callers were told
            lend = self._engine.draft_states.lending(event.request_id, event.lease_id)
            self._inbox.put(lambda: lend(self._failure is None))
        stream = self._streams.get(event.request_id)
        if stream is None or not self._send(stream, [event]):
            self._drop_reservation(event)

    def _drop_reservation(self, update: _Update) -> None:
        """Drops the reservation of an update that no caller will get; else it would be held for ever."""
        if isinstance(update, KVReserved):
            self.post(lambda engine: engine.kv.drop(update.fetch_id))

    def _require_running(self) -> None:
        if self._failure is not None:
            raise EngineStoppedError(self._failure)

    def _add(
        self,
        stream: _Stream,
        prompt: str | Sequence[int],
        params: SamplingParams,
        request_id: str | None,
        priority: int,
        scope: CacheScope,
        handoff: Handoff,
    ) -> None:
        if self._failure is not None:
            self._send(stream, [EngineStoppedError(self._failure)])
            return
        try:
            stream.request_id = self._engine.add_request(
                prompt, params, request_id=request_id, priority=priority, scope=scope, handoff=handoff
            )
        except TandemError as error:
            self._send(stream, [error])
        else:
            self._streams[stream.request_id] = stream

    def _abort(self, stream: _Stream) -> None:
        if stream.request_id is not None and self._streams.get(stream.request_id) is stream:
            del self._streams[stream.request_id]
            self._engine.abort(stream.request_id)

    def _run(self) -> None:
        try:
            while self._take_turn():
                pass
            for request_id in self._streams:
                self._engine.abort(request_id)
            self._fail("the engine was stopped")
        except BaseException as error:  # the edge of the engine's thread: whatever it is, every caller must hear of it
            self._fail(f"the engine failed: {type(error).__name__}: {error}")
            raise

    def _take_turn(self) -> bool:
        """Serves what callers have asked for, then runs a step. False = stop."""
        try:
            if not self._serve_inbox():
                return False
            self._busy_since_s = monotonic_s()
            self._dispatch(self._engine.step())
        except RanksLostError as error:
            self._recover(error)
        return True

    def _recover(self, lost: RanksLostError) -> None:
        """Ends all requests, which other workers can continue, then has the ranks replaced; new calls wait meanwhile.

        NOTE: `on_recovering` is called first, so that callers whose streams end do not come back at once.
        """
        self._busy_since_s = None
        if self.on_recovering is not None:
            self.on_recovering(True)
        for request_id, stream in self._streams.items():
            self._send(stream, [WorkerLostError(f"the ranks of this worker are formed anew: {lost}")])
            self._engine.abort(request_id)
        self._streams.clear()
        self._engine.recover(lost)
        if self.on_recovering is not None:
            self.on_recovering(False)

    def _serve_inbox(self) -> bool:
        """Do what callers have asked for by now; waits for them when there is nothing to compute. False = stop.

        NOTE: what arrives meanwhile waits for the next step, so that a flood of callers cannot hold up the running.
        """
        is_idle = self._engine.is_stalled or not self._engine.has_work
        if is_idle and self.on_busy is not None:
            self.on_busy(False)
        for _ in range(max(self._inbox.qsize(), is_idle)):
            self._busy_since_s = None
            action = self._inbox.get()
            self._busy_since_s = monotonic_s()
            if action is _STOP:
                return False
            action()
        if is_idle and self.on_busy is not None:
            self.on_busy(True)
        return True

    def _dispatch(self, outputs: list[RequestOutput]) -> None:
        by_stream: dict[str, list[_Update]] = {}
        for output in outputs:
            by_stream.setdefault(output.request_id, []).append(output)
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, Sequence[_Update]]]] = {}
        for request_id, updates in by_stream.items():
            stream = self._streams.get(request_id)
            if stream is not None:  # else it was added to the engine directly, before this loop began
                by_loop.setdefault(stream.loop, []).append((stream, updates))
        for loop, deliveries in by_loop.items():
            is_heard = _call_soon(loop, partial(self._deliver, deliveries))
            for stream, _ in deliveries:
                if not is_heard:
                    self._abort(stream)
                elif stream.request_id is not None and not self._engine.knows(stream.request_id):
                    del self._streams[stream.request_id]

    def _deliver(self, deliveries: Sequence[tuple[_Stream, Sequence[_Update]]]) -> None:
        """Puts updates into their streams. Runs on the callers' event loop."""
        for stream, updates in deliveries:
            for item in updates:
                if stream.is_abandoned:
                    self._drop_reservation(item)
                else:
                    stream.updates.put_nowait(item)

    def _send(self, stream: _Stream, updates: Sequence[_Update]) -> bool:
        """Hand updates to the caller's loop in one wake-up. False: that loop has closed, so nobody listens any more."""
        return _call_soon(stream.loop, partial(self._deliver, [(stream, updates)]))

    def _fail(self, reason: str) -> None:
        """Ends all requests and refuses new ones, with this reason.

        The reason is set before the inbox is drained, and callers look at it after they put into the inbox: none slips
        between.
        """
        self._failure = reason
        self._busy_since_s = None
        for stream in self._streams.values():
            self._send(stream, [EngineStoppedError(reason)])
        self._streams.clear()
        while not self._inbox.empty():
            action = self._inbox.get()
            if action is not _STOP:
                action()


def _call_soon(loop: asyncio.AbstractEventLoop, action: Callable[[], None]) -> bool:
    """Schedules an action on an event loop, from any thread. False: the loop has closed."""
    try:
        loop.call_soon_threadsafe(action)
    except RuntimeError:
        assert loop.is_closed()
        return False
    return True


def _resolve(future: "asyncio.Future[_Result]", result: _Result) -> None:
    if not future.done():
        future.set_result(result)


def _reject(future: "asyncio.Future[_Result]", error: TandemError) -> None:
    if not future.done():
        future.set_exception(error)
