"""Event loop on a virtual clock: time jumps to the next timer when nothing is ready; nothing really waits.

Invariant: the order of callbacks is a function of the seed. Callbacks of one node keep their order, as in asyncio; the
seed chooses the node that runs next. Work for threads runs as one event after a delay drawn from the seed; its result
arrives after the time that the work declared by `spend`.
"""

import asyncio
import gc
import heapq
import itertools
import random
import socket
import sys
import warnings
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextvars import Context
from typing import Any

from tandem.simulation.node import Node, current_node

_QUICK_JOB_S = 50e-6  # mean delay of work for threads
_SLOW_JOB_S = 5e-3  # the same of a share of the work
_SLOW_JOB_SHARE = 0.05
_MAX_CLOSES = 20  # attempts to end a coroutine that awaits again
_MAX_EVENTS = 2_000_000  # of a run; most have less than 100,000

Connect = Callable[[Callable[[], Any], str, int], Awaitable[tuple[asyncio.Transport, Any]]]


class DeadlockError(RuntimeError):
    """Nothing is ready and no timer is set, so all tasks would wait for ever."""


class EndlessError(RuntimeError):
    """So many callbacks ran without an end that something must loop for ever."""


class _Task(asyncio.Task[Any]):
    """A task with a deterministic hash, so that the order of sets of tasks does not depend on addresses."""

    def __init__(self, coro: Coroutine[Any, Any, Any], number: int, **options: Any) -> None:
        self.number = number
        super().__init__(coro, **options)

    def __hash__(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        return self is other


class VirtualLoop(asyncio.BaseEventLoop):
    """Event loop of all nodes. `world` is the node of callbacks that belong to no other.

    `num_events` counts callbacks that ran; `bugs` collects uncaught exceptions of tasks, after each of which
    `on_bug` is called. `connect` opens streams.
    """

    def __init__(self, seed: str) -> None:
        super().__init__()
        self._random = random.Random(f"{seed} order")
        self._now_s = 0.0
        self._ahead_s = 0.0
        self._timers: list[tuple[float, int, Node, asyncio.Handle]] = []
        self._numbers = itertools.count()
        self._graveyard: list[object] = []
        self._late_tasks: list[asyncio.Task[Any]] = []  # still to be closed when the run is over
        self._at_end: list[Callable[[], None]] = []
        self._is_over = False
        self.in_job = False
        self.connect: Connect | None = None
        self.num_events = 0
        self.bugs: list[str] = []
        self.on_bug: Callable[[], None] = lambda: None
        self.world = Node("world", self.time, random.Random(f"{seed} world"))
        self._nodes = [self.world]
        self.set_task_factory(self._new_task)
        self.set_exception_handler(lambda _, what: self._note_bug(what))

    def add(self, node: Node) -> None:
        """Adds a node."""
        self._nodes.append(node)

    def kill(self, node: Node) -> None:
        """Ends a node as SIGKILL does: none of its code runs again, not even clean-up."""
        node.is_dead = True
        # NOTE: kept, as freeing a suspended coroutine would run its `finally` blocks
        self._graveyard += [*node.ready, *node.tasks]
        node.ready.clear()
        self._nodes.remove(node)

    def spend(self, seconds: float) -> None:
        """Declare the virtual duration of the thread work that is running."""
        assert self.in_job, "only what runs as a thread would can take time"
        self._ahead_s += seconds

    def run_job(self, work: Callable[[], Any]) -> float:
        """Runs a job of a node's thread; returns its duration."""
        assert not self.in_job
        self.in_job = True
        try:
            work()
            return self._ahead_s
        finally:
            self.in_job = False
            self._ahead_s = 0.0

    def at_end(self, action: Callable[[], None]) -> None:
        """Registers an action that `tear_down` runs before everything else."""
        self._at_end.append(action)

    def tear_down(self) -> None:
        """Cancels everything that still waits. The loop must not be used afterwards."""
        self._is_over = True
        while self._at_end:
            self._at_end.pop()()
        with warnings.catch_warnings():
            self._let_go()

    def _let_go(self) -> None:
        former = sys.unraisablehook
        sys.unraisablehook = lambda _: None  # NOTE: coroutines are freed in no order, and some object
        asyncio._set_running_loop(self)  # NOTE: otherwise what they start at their end stays in the thread's own loop
        try:
            warnings.simplefilter("ignore")
            for node in self._nodes:
                self._graveyard += node.tasks
            self._late_tasks += [item for item in self._graveyard if isinstance(item, asyncio.Task) and not item.done()]
            self._close_late_tasks()
            self._graveyard.clear()
            self._timers.clear()
            self._nodes.clear()
            gc.collect()
            self._close_late_tasks()  # NOTE: begun by coroutines that were freed
            self.close()
        finally:
            asyncio._set_running_loop(None)
            sys.unraisablehook = former

    def _close_late_tasks(self) -> None:
        while self._late_tasks:
            tasks, self._late_tasks = self._late_tasks, []
            for task in tasks:
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                _close(task)

    def time(self) -> float:
        return self._now_s + self._ahead_s

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        node = _node_of(handle) or self.world
        if not (node.is_dead or self._is_over):
            node.ready.append(handle)
        return handle

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """Called from a thread's job: the callback runs when the job's declared duration is over."""
        if not self._ahead_s:
            return self.call_soon(callback, *args, context=context)
        return self.call_at(self.time(), callback, *args, context=context)

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        node = _node_of(handle) or self.world
        if not (node.is_dead or self._is_over):
            heapq.heappush(self._timers, (when, next(self._numbers), node, handle))
        return handle

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> "asyncio.Future[Any]":
        future: asyncio.Future[Any] = self.create_future()
        node = current_node.get() or self.world
        mean_s = _SLOW_JOB_S if self._random.random() < _SLOW_JOB_SHARE else _QUICK_JOB_S
        self.call_later(self._random.expovariate(1 / mean_s) * node.slowness, self._run_future, future, func, args)
        return future

    async def getaddrinfo(  # type: ignore[override]
        self, host: str, port: int, **_: Any
    ) -> Sequence[tuple[int, int, int, str, tuple[str, int]]]:
        """A node's name is its address."""
        return [(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (host, port))]

    async def create_connection(  # type: ignore[override]
        self, protocol_factory: Callable[[], Any], host: str, port: int, **_: Any
    ) -> tuple[asyncio.Transport, Any]:
        assert self.connect is not None, "there is nothing to connect to"
        return await self.connect(protocol_factory, host, port)

    def _run_future(self, future: "asyncio.Future[Any]", func: Callable[..., Any], args: tuple[Any, ...]) -> None:
        if future.cancelled():
            return
        outcome: list[Any] = []

        def work() -> None:
            try:
                outcome.extend((True, func(*args)))
            except Exception as error:  # the edge of a thread: whoever waits for it is told
                outcome.extend((False, error))

        seconds = self.run_job(work)
        self.call_later(seconds, _settle, future, *outcome)

    def _run_once(self) -> None:
        runnable = [node for node in self._nodes if node.ready and not node.is_paused]
        if not runnable:
            self._advance()
            return
        node = runnable[0] if len(runnable) == 1 else self._random.choice(runnable)
        handle = node.ready.popleft()
        if not handle.cancelled():
            self.num_events += 1
            if self.num_events > _MAX_EVENTS:
                raise EndlessError(f"{_MAX_EVENTS} callbacks ran until {self._now_s:.3f} s, the next is of {node.name}")
            handle._run()

    def _advance(self) -> None:
        """Make the next timer's callback ready."""
        while self._timers:
            when_s, _, node, handle = heapq.heappop(self._timers)
            if not (node.is_dead or handle.cancelled()):
                self._now_s = max(self._now_s, when_s)
                node.ready.append(handle)
                return
        raise DeadlockError(f"nothing is ready and no timer is set at {self._now_s:.3f} s")

    def _new_task(self, loop: asyncio.AbstractEventLoop, coro: Any, context: Context | None = None) -> Any:
        task = _Task(coro, next(self._numbers), loop=self, context=context)
        node = (current_node.get() if context is None else context.get(current_node)) or self.world
        node.tasks.add(task)
        if self._is_over:
            self._late_tasks.append(task)
        return task

    def _note_bug(self, what: dict[str, Any]) -> None:
        error = what.get("exception")
        self.bugs.append(f"{what.get('message')}: {type(error).__name__}: {error}")
        self.on_bug()

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """No effect: a cancelled timer is dropped when it is due."""

    def _asyncgen_finalizer_hook(self, agen: Any) -> None:
        self._asyncgens.discard(agen)  # type: ignore[attr-defined]
        if not self._is_over:
            self.call_soon(self.create_task, agen.aclose())

    def _process_events(self, event_list: object) -> None:
        """No effect: there is no selector."""

    def _write_to_self(self) -> None:
        """No effect: there is no selector to wake."""


def _close(task: "asyncio.Task[Any]") -> None:
    """Ends a task's coroutine, however often it awaits again while ending."""
    coroutine: Any = task.get_coro()
    for _ in range(_MAX_CLOSES):
        try:
            coroutine.close()
            return
        except (RuntimeError, ValueError):
            continue
        except BaseException:  # whatever it raises on its way out, nobody is left to hear of it
            return


def _node_of(handle: asyncio.Handle) -> Node | None:
    context: Context = handle._context  # type: ignore[attr-defined]
    return context.get(current_node)


def _settle(future: "asyncio.Future[Any]", is_result: bool, outcome: Any) -> None:
    if future.cancelled():
        return
    if is_result:
        future.set_result(outcome)
    else:
        future.set_exception(outcome)
