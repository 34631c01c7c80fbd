"""Node: one simulated process, whose tasks run in its context with random bytes of its own and the simulation's time.

Its wall clock may be set off from that time; its other clocks are not. Invariant: all code in a node's context belongs
to the node; a dead node never runs again, a paused one not until it resumes. Faults (`simulation.faults`) set these
states here, and the event loop (`simulation.loop`) obeys them.
"""

import asyncio
import random
import weakref
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import Any, TypeVar

from tandem.core.machine import current_machine
from tandem.rpc.protocols import SPOKEN

EPOCH_S = 1_800_000_000.0  # wall-clock time at the start of a run
T = TypeVar("T")

current_node: ContextVar["Node | None"] = ContextVar("current_node", default=None)


class Node:
    """A process named `name`; implements `core.machine.Machine`.

    Args:
        now_s: the loop's time.
        source: of its random bytes.

    `spoken`: versions of the protocol that it speaks. `is_previous_release`: it runs the previous release.

    `ready` holds callbacks that the loop may run; `tasks` its unfinished tasks. `slowness` multiplies the duration of
    its steps, copies and jobs.
    """

    def __init__(self, name: str, now_s: Callable[[], float], source: random.Random) -> None:
        self.name = name
        self.is_dead = False
        self.is_paused = False
        self.slowness = 1.0
        self.spoken = SPOKEN
        self.is_previous_release = False
        self.wall_offset_s = 0.0
        self.random = source
        self.ready: deque[asyncio.Handle] = deque()
        self.tasks: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()
        self._now_s = now_s
        self.context: Context = copy_context()
        self.context.run(self._enter)

    def monotonic_s(self) -> float:
        return self._now_s()

    def wall_s(self) -> float:
        return EPOCH_S + self.wall_offset_s + self._now_s()

    def random_bytes(self, num_bytes: int) -> bytes:
        return self.random.randbytes(num_bytes)

    def process_id(self) -> int:
        """Returns 1. NOTE: the real process's number would change the sizes of messages from run to run."""
        return 1

    def cpu_s(self) -> float:
        """Returns 0. NOTE: all nodes are one process of the real machine, whose time would differ from run to run."""
        return 0.0

    def resident_bytes(self) -> int:
        return 0

    def now_s(self) -> float:
        """Time, as `core.clock.Clock`."""
        return self._now_s()

    def spawn(self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T], name: str) -> "asyncio.Task[T]":
        """Runs a coroutine as a task of this node."""
        return loop.create_task(work, name=name, context=self.context.copy())

    def _enter(self) -> None:
        current_node.set(self)
        current_machine.set(self)
