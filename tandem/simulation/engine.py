"""Asynchronous engines of simulated workers: `AsyncEngine` without a thread; a turn of its loop takes virtual time.

Results of a turn are delivered when the turn is over, as from a thread that was busy until then. An engine of several
ranks waits for them within a turn, so it runs in a fiber.
"""

import queue
from collections.abc import Callable

from tandem.core.errors import EngineStoppedError, TandemError
from tandem.engine.async_engine import AsyncEngine
from tandem.engine.engine import Engine
from tandem.simulation.fibers import Fiber, Signal, current_fiber
from tandem.simulation.loop import VirtualLoop
from tandem.simulation.node import Node

_Action = Callable[[], None] | None


class _Inbox(queue.SimpleQueue[_Action]):
    """Wakes the engine for each action."""

    def __init__(self, wake: Callable[[], None]) -> None:
        super().__init__()
        self._wake = wake

    def put(self, item: _Action, block: bool = True, timeout: float | None = None) -> None:
        super().put(item, block, timeout)
        self._wake()


class SteppedEngine(AsyncEngine):
    """`AsyncEngine` of one rank; each turn of its loop is an event of `node`. `on_turn` is called after each turn."""

    def __init__(self, engine: Engine, loop: VirtualLoop, node: Node, on_turn: Callable[[Engine], None]) -> None:
        super().__init__(engine)
        self._inbox = _Inbox(self._wake)
        self._loop = loop
        self._node = node
        self._on_turn = on_turn
        self._is_turning = False

    def start(self) -> None:
        if self._was_started:
            raise EngineStoppedError("this engine was started before; build another one")
        self._was_started = True
        self._failure = None

    def stop(self) -> None:
        self._fail("the engine was stopped")

    def busy_s(self) -> float:
        """Always 0, since a turn never hangs here."""
        return 0.0

    def _wake(self) -> None:
        if not self._is_turning and self._was_started:
            self._is_turning = True
            self._loop.call_soon_threadsafe(self._turn, context=self._node.context)

    def _turn(self) -> None:
        engine = self._engine
        if self._failure is not None or (self._inbox.empty() and (engine.is_stalled or not engine.has_work)):
            self._is_turning = False
            return
        seconds = self._loop.run_job(self._serve_one)
        self._loop.call_later(seconds, self._turn, context=self._node.context)

    def _serve_one(self) -> None:
        try:
            if self._serve_inbox():
                self._dispatch(self._engine.step())
                self._on_turn(self._engine)
        except BaseException as error:
            self._fail(f"the engine failed: {type(error).__name__}: {error}")
            raise


class _FiberInbox(queue.SimpleQueue[_Action]):
    """A queue at which a fiber waits."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = Signal()

    def put(self, item: _Action, block: bool = True, timeout: float | None = None) -> None:
        super().put(item, block, timeout)
        self._changed.notify()

    def get(self, block: bool = True, timeout: float | None = None) -> _Action:
        current_fiber().wait_for(lambda: not self.empty(), self._changed)
        return super().get(block, timeout)


class FiberEngine(AsyncEngine):
    """`AsyncEngine` of several ranks; its loop runs in a fiber of `node`. `on_turn` is called after each turn."""

    def __init__(self, engine: Engine, loop: VirtualLoop, node: Node, on_turn: Callable[[Engine], None]) -> None:
        super().__init__(engine)
        self._inbox = _FiberInbox()
        self._loop, self._node, self._on_turn = loop, node, on_turn

    def start(self) -> None:
        if self._was_started:
            raise EngineStoppedError("this engine was started before; build another one")
        self._was_started = True
        self._failure = None
        self._fiber = Fiber(self._loop, self._node, self._run, self._end)

    def stop(self) -> None:
        self._inbox.put(None)

    def _take_turn(self) -> bool:
        goes_on = super()._take_turn()
        self._on_turn(self._engine)
        return goes_on

    def _end(self, error: BaseException | None) -> None:
        """Ends with the fiber. NOTE: an engine that cannot have ranks again fails, and its process ends with it."""
        if error is not None and not isinstance(error, TandemError):
            raise error
