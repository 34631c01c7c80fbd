"""Host tier of a simulated worker: production's memory and copies; their threads are replaced by events of the node."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tandem.core.clock import Clock
from tandem.simulation.loop import VirtualLoop
from tandem.simulation.node import Node
from tandem.worker.host_tier import HostCopier, HostPages, Post

_COPY_S = 0.03  # mean


class _NodeThread(ThreadPoolExecutor):
    """Executor with one thread's behaviour: jobs run one after another, each as one event after its duration."""

    def __init__(self, loop: VirtualLoop, node: Node) -> None:
        super().__init__(1)
        self._loop, self._node = loop, node
        self._is_free_s = 0.0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **named: Any) -> Any:
        """Returns nothing: nobody waits for these jobs."""
        duration_s = self._node.random.expovariate(1 / _COPY_S) * self._node.slowness
        self._is_free_s = max(self._loop.time(), self._is_free_s) + duration_s
        self._loop.call_at(self._is_free_s, self._run, fn, args, context=self._node.context)

    def _run(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._loop.run_job(lambda: fn(*args))


class SimulatedCopier(HostCopier):
    """`worker.host_tier.HostCopier` of a node."""

    def __init__(self, pages: HostPages, clock: Clock, post: Post, loop: VirtualLoop, node: Node) -> None:
        super().__init__(pages, clock, post)
        self._out, self._back = _NodeThread(loop, node), _NodeThread(loop, node)
