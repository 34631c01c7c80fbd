"""An engine for asyncio callers: one thread runs the loop, one queue goes in, one queue per request comes out.

The thread alone touches the engine. A caller that stops iterating, for whatever reason, aborts its request.
"""

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Final

from tandem.core.errors import EngineStoppedError, TandemError
from tandem.core.sampling_params import SamplingParams
from tandem.engine.engine import Engine
from tandem.engine.output import RequestOutput

_STOP: Final = None
_News = RequestOutput | TandemError


@dataclass(slots=True)
class _Stream:
    """One caller's end: news is put here from its own event loop."""

    loop: asyncio.AbstractEventLoop
    news: asyncio.Queue[_News]
    num_unfinished: int


class AsyncEngine:
    """Runs an `Engine` on a thread of its own.

    Use as `async with AsyncEngine(engine) as serving: async for output in serving.generate(...)`.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._streams: dict[str, _Stream] = {}
        self._failure: str | None = "the engine has not been started"
        self._thread = threading.Thread(target=self._run, name="tandem-engine", daemon=True)
        self._num_requests = 0

    async def __aenter__(self) -> "AsyncEngine":
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.stop)

    def start(self) -> None:
        """Start the loop. Once in an engine's life."""
        self._failure = None
        self._thread.start()

    def stop(self) -> None:
        """End every request with `EngineStoppedError` and wait for the loop to end."""
        self._inbox.put(_STOP)
        self._thread.join()

    async def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        adapter: str = "",
        cache_salt: str = "",
    ) -> AsyncIterator[RequestOutput]:
        """Serve one request; see `Engine.add_request` for the arguments.

        Raises:
            InvalidRequestError, CapacityError: as `Engine.add_request`.
            EngineStoppedError: when the engine stops or fails before the request ends.
        """
        if request_id is None:
            request_id = f"async-{self._num_requests}"
        self._num_requests += 1
        stream = _Stream(asyncio.get_running_loop(), asyncio.Queue(), params.n)

        def add() -> None:
            self._add(stream, prompt, params, request_id, priority, adapter, cache_salt)

        self._inbox.put(add)
        if self._failure is not None:
            raise EngineStoppedError(self._failure)
        try:
            while stream.num_unfinished:
                news = await stream.news.get()
                if isinstance(news, TandemError):
                    stream.num_unfinished = 0
                    raise news
                stream.num_unfinished -= news.finished
                yield news
        finally:
            if stream.num_unfinished:
                self._inbox.put(lambda: self._abort(stream, request_id))

    def _add(
        self,
        stream: _Stream,
        prompt: str | Sequence[int],
        params: SamplingParams,
        request_id: str,
        priority: int,
        adapter: str,
        cache_salt: str,
    ) -> None:
        if self._failure is not None:
            _tell(stream, [EngineStoppedError(self._failure)])
            return
        try:
            self._engine.add_request(
                prompt, params, request_id=request_id, priority=priority, adapter=adapter, cache_salt=cache_salt
            )
        except TandemError as error:
            _tell(stream, [error])
        else:
            self._streams[request_id] = stream

    def _abort(self, stream: _Stream, request_id: str) -> None:
        if self._streams.get(request_id) is stream:
            del self._streams[request_id]
            self._engine.abort(request_id)

    def _run(self) -> None:
        try:
            while self._serve_inbox():
                self._dispatch(self._engine.step())
            self._fail("the engine was stopped")
        except Exception as error:  # the edge of the engine's thread: whatever it is, every caller must hear of it
            self._fail(f"the engine failed: {type(error).__name__}: {error}")
            raise

    def _serve_inbox(self) -> bool:
        """Do what callers asked for; waits for them when there is nothing to compute. False = stop."""
        while not (self._inbox.empty() and self._engine.has_work):
            action = self._inbox.get()
            if action is _STOP:
                return False
            action()
        return True

    def _dispatch(self, outputs: list[RequestOutput]) -> None:
        by_stream: dict[str, list[_News]] = {}
        for output in outputs:
            by_stream.setdefault(output.request_id, []).append(output)
        for request_id, news in by_stream.items():
            stream = self._streams[request_id]
            _tell(stream, news)
            if not self._engine.knows(request_id):
                del self._streams[request_id]

    def _fail(self, reason: str) -> None:
        """End what is here and refuse what comes.

        The reason is set before the inbox is drained, and callers look at it after they put into the inbox: none slips
        between.
        """
        self._failure = reason
        for stream in self._streams.values():
            _tell(stream, [EngineStoppedError(reason)])
        self._streams.clear()
        while not self._inbox.empty():
            action = self._inbox.get()
            if action is not _STOP:
                action()


def _tell(stream: _Stream, news: list[_News]) -> None:
    """Hand news to the caller's loop in one wake-up. A loop that has closed has no caller any more."""

    def deliver() -> None:
        for item in news:
            stream.news.put_nowait(item)

    try:
        stream.loop.call_soon_threadsafe(deliver)
    except RuntimeError:
        assert stream.loop.is_closed()
