"""starting → ready → draining → stopped. Counts what runs, so that draining ends when the last of it has."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum

from tandem.core.errors import UnavailableError


class LifecycleState(StrEnum):
    """What a process may be asked for."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"


class Lifecycle:
    """One process's. Used by its event loop alone."""

    def __init__(self, name: str) -> None:
        self.state = LifecycleState.STARTING
        self.num_working = 0
        self._name = name
        self._changed = asyncio.Event()
        self._drained = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    def ready(self) -> None:
        """It takes work from now on."""
        if self.state is LifecycleState.STARTING:
            self._become(LifecycleState.READY)

    def drain(self) -> None:
        """It takes no new work. Again is ignored."""
        if self.state in (LifecycleState.STARTING, LifecycleState.READY):
            self._become(LifecycleState.DRAINING)
        self._drained.set()

    def stopped(self) -> None:
        self._become(LifecycleState.STOPPED)

    def require_ready(self) -> None:
        """
        Raises:
            UnavailableError: it takes no work.
        """
        if self.state is not LifecycleState.READY:
            raise UnavailableError(f"worker {self._name} is {self.state} and takes no new work", 1.0)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Something runs that draining waits for."""
        self.num_working += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.num_working -= 1
            if self.num_working == 0:
                self._idle.set()

    async def until_drained(self) -> None:
        """Wait until it is told to drain."""
        await self._drained.wait()

    async def until_idle(self, timeout_s: float) -> bool:
        """Whether nothing runs any more, waiting for that up to `timeout_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        return self._idle.is_set()  # NOTE: with no time to wait it was not even asked

    async def changed_within(self, timeout_s: float) -> bool:
        """Whether the state changes, waiting for that up to `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def _become(self, state: LifecycleState) -> None:
        self.state = state
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
