"""An engine that is moved step by step, on a thread of its own, as the backend of a completions server."""

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from bench.race.peers.scripts.completions import Asked, Delta


class Engine(Protocol):
    """Used by one thread only."""

    def add(self, request_id: int, prompt: list[int], num_output: int) -> None:
        """Queue a request for exactly `num_output` tokens, greedy."""
        ...

    def cancel(self, request_id: int) -> None:
        """Forget it; its client has gone."""
        ...

    def step(self) -> Sequence[Delta]:
        """Move everything on by a step."""
        ...


class Stepping:
    """The engine's thread: takes in what came, steps while there is work, and wakes the loop once a step."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._inbox: queue.SimpleQueue[Asked | int] = queue.SimpleQueue()
        self._running: dict[int, Asked] = {}

    def begin(self, loop: asyncio.AbstractEventLoop, on_error: Callable[[BaseException], None]) -> None:
        threading.Thread(target=self._run, args=(loop, on_error), daemon=True).start()

    def put(self, asked: Asked) -> None:
        self._inbox.put(asked)

    def cancel(self, request_id: int) -> None:
        self._inbox.put(request_id)

    def _run(self, loop: asyncio.AbstractEventLoop, on_error: Callable[[BaseException], None]) -> None:
        """NOTE: whatever ends this thread ends the server: a client must not wait for tokens that never come."""
        try:
            while True:
                self._take_in()
                if known := self._known(self._engine.step()):
                    loop.call_soon_threadsafe(_deliver, known)
        except BaseException as error:
            loop.call_soon_threadsafe(on_error, error)

    def _take_in(self) -> None:
        """All that waits; when nothing runs, it waits for something."""
        while not self._running or not self._inbox.empty():
            asked = self._inbox.get()
            if isinstance(asked, Asked):
                self._running[asked.request_id] = asked
                self._engine.add(asked.request_id, asked.prompt, asked.num_output)
            elif self._running.pop(asked, None):
                self._engine.cancel(asked)

    def _known(self, deltas: Sequence[Delta]) -> list[tuple[Asked, Delta]]:
        """With their requests, as far as those still run."""
        known = [(self._running[delta.request_id], delta) for delta in deltas if delta.request_id in self._running]
        for _, delta in known:
            if delta.is_last:
                del self._running[delta.request_id]
        return known


def _deliver(deltas: Sequence[tuple[Asked, Delta]]) -> None:
    for asked, delta in deltas:
        asked.deltas.put_nowait(delta)
