"""Systems that stand side by side, all but one of them stopped (SIGSTOP), so that one after the other can be asked the
same within the same minute.

Invariant: of those that are up, at most one has processes that run. A system is ended while it runs, since a stopped
one does not heed the signal to end.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from bench.race.processes import ProcessTrees
from bench.race.system import Served, System
from tandem.core.errors import UnavailableError

SETTLE_S = 1.0  # in which one that was stopped for longer than that finds out for how long
WAKE_S = 60.0
_POLL_S = 0.05


@dataclass(slots=True)
class _Standing:
    served: Served
    trees: ProcessTrees
    ending: ExitStack
    stopped_s: float = 0.0


class Stand:
    """Systems that stand side by side. Use as a context: leaving it ends them all."""

    def __init__(self, checkpoint: Path, sleep: Callable[[float], None] = time.sleep) -> None:
        self._checkpoint = checkpoint
        self._sleep = sleep
        self._standing: dict[str, _Standing] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with ExitStack() as each:
            for name in list(self._standing):
                each.callback(self.end, name)

    def start(self, system: System) -> None:
        """Raises what `System.serve` raises."""
        with ExitStack() as ending:
            served = ending.enter_context(system.serve(self._checkpoint))
            found = _Standing(served, ProcessTrees(served.pids), ending.pop_all())
        self._standing[system.name] = found
        _stop(found)

    @contextmanager
    def running(self, system: System) -> Iterator[Served]:
        """It alone runs, and is ready. Raises UnavailableError: it is not, after `WAKE_S`."""
        found = self._standing[system.name]
        found.trees.go_on()
        try:
            self._await_ready(system.name, found)
            yield found.served
        finally:
            _stop(found)

    def end(self, name: str) -> None:
        """Its processes are gone afterwards."""
        found = self._standing.pop(name)
        found.trees.go_on()
        found.ending.close()

    def _await_ready(self, name: str, found: _Standing) -> None:
        now_s = time.monotonic()
        if now_s - found.stopped_s > SETTLE_S:
            self._sleep(SETTLE_S)
        while not found.served.is_ready():
            if time.monotonic() - now_s > WAKE_S:
                raise UnavailableError(f"{name} is not ready {WAKE_S:g} s after it went on")
            self._sleep(_POLL_S)


def _stop(found: _Standing) -> None:
    found.trees.stop()
    found.stopped_s = time.monotonic()
