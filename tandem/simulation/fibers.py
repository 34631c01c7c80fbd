"""Fibers: functions that block in the middle, as code in a thread does, but in virtual time.

Each has a real thread, since Python code cannot be suspended otherwise; the thread and the event loop run in turns,
never together. Resuming a fiber is an event of its node: on a dead node none is resumed, on a paused one only after the
pause.
"""

import threading
from collections.abc import Callable, Coroutine
from typing import Any

from tandem.simulation.loop import VirtualLoop
from tandem.simulation.node import Node


class _OverError(BaseException):
    """Ends a fiber that still waits when the run is over. NOTE: no `except Exception` may catch it."""


class Signal:
    """Wakes the fibers that wait for a condition. Call `notify` after each change of a value that they look at."""

    def __init__(self) -> None:
        self.waiting: dict[Fiber, None] = {}

    def notify(self) -> None:
        waiting, self.waiting = self.waiting, {}
        for fiber in waiting:
            fiber.wake()


class Fiber:
    """Runs `work` on a node, from its next event on. `on_end` gets the error that it raised or None, in the node's
    context.
    """

    def __init__(
        self,
        loop: VirtualLoop,
        node: Node,
        work: Callable[[], object],
        on_end: Callable[[BaseException | None], None] = lambda error: None,
    ) -> None:
        self.node = node
        self._loop, self._work, self._on_end = loop, work, on_end
        self._turn, self._back = threading.Lock(), threading.Lock()
        self._turn.acquire()
        self._back.acquire()
        self._is_over = self._is_done = False
        self._num_waits = 0
        self._error: BaseException | None = None
        context = node.context.copy()
        self._thread = threading.Thread(target=lambda: context.run(self._run), name=f"fiber-{node.name}", daemon=True)
        loop.at_end(self._end)
        loop.call_soon(self._begin, context=node.context)

    def wait_for(self, is_so: Callable[[], bool], changed: Signal, timeout_s: float | None = None) -> bool:
        """Waits until `is_so()` is true, checking whenever `changed` is notified, or until `timeout_s` of virtual time
        are over; returns whether it is true.
        """
        limit_s = None if timeout_s is None else self._loop.time() + timeout_s
        while not is_so():
            now_s = self._loop.time()
            if limit_s is not None and now_s >= limit_s:
                return False
            changed.waiting[self] = None
            self._suspend(limit_s)
            changed.waiting.pop(self, None)
        return True

    def sleep(self, seconds: float) -> None:
        """Let virtual time pass."""
        limit_s = self._loop.time() + seconds
        while self._loop.time() < limit_s:
            self._suspend(limit_s)

    def wake(self) -> None:
        """Have the fiber check its condition again."""
        self._loop.call_soon(self._resume, self._num_waits, context=self.node.context)

    def _suspend(self, until_s: float | None) -> None:
        """Lets the event loop run until this fiber is woken or the time has come."""
        self._num_waits += 1
        if until_s is not None:
            self._loop.call_at(until_s, self._resume, self._num_waits, context=self.node.context)
        self._back.release()
        self._turn.acquire()
        if self._is_over:
            raise _OverError

    def _begin(self) -> None:
        self._thread.start()
        self._await()

    def _resume(self, number: int) -> None:
        """Resumes the fiber, unless it was woken for another reason meanwhile."""
        if number == self._num_waits and not self._is_done:
            self._turn.release()
            self._await()

    def _await(self) -> None:
        self._back.acquire()
        if self._is_done:
            self._thread.join()
            self._on_end(self._error)

    def _run(self) -> None:
        _own.fiber = self
        try:
            self._work()
        except _OverError:
            pass
        except BaseException as error:  # the edge of a thread: whoever began it is told
            self._error = error
        self._is_done = True
        self._back.release()

    def _end(self) -> None:
        """Ends the fiber since the run is over."""
        self._is_over = True
        while self._thread.is_alive():
            self._turn.release()
            self._back.acquire()
            if self._is_done:
                self._thread.join()


class _Own(threading.local):
    fiber: Fiber | None = None


_own = _Own()


def current_fiber() -> Fiber:
    """The fiber in which the caller runs."""
    assert _own.fiber is not None, "only a fiber can wait"
    return _own.fiber


def waiting_in_fiber(loop: VirtualLoop, node: Node) -> Callable[[Coroutine[Any, Any, Any], float], Any]:
    """Returns a function by which a fiber of this node waits for a call of its event loop, as a thread does."""

    def wait(call: Coroutine[Any, Any, Any], timeout_s: float) -> Any:
        ended = Signal()
        task = node.context.copy().run(loop.create_task, call)
        task.add_done_callback(lambda _: ended.notify(), context=node.context)
        if not current_fiber().wait_for(task.done, ended, timeout_s):
            raise TimeoutError
        return task.result()

    return wait


async def in_fiber(loop: VirtualLoop, node: Node, work: Callable[[], Any]) -> Any:
    """Runs `work` in a fiber and returns its result; counterpart of `asyncio.to_thread`."""
    outcome: list[Any] = []
    future: Any = loop.create_future()

    def end(error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is None:
            future.set_result(outcome[0])
        else:
            future.set_exception(error)

    Fiber(loop, node, lambda: outcome.append(work()), end)
    return await future
