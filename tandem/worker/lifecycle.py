"""Lifecycle of a worker process: starting → ready → draining → stopped. Counts running work, for which draining waits.

A ready process is *recovering* while its ranks are replaced.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum

from tandem.core.errors import UnavailableError


class LifecycleState(StrEnum):
    """State of a process; only a ready one accepts work."""

    STARTING = "starting"
    READY = "ready"
    RECOVERING = "recovering"
    DRAINING = "draining"
    STOPPED = "stopped"


class Lifecycle:
    """Lifecycle of one process. Used by its event loop alone."""

    def __init__(self, name: str) -> None:
        self.state = LifecycleState.STARTING
        self.num_working = 0
        self._name = name
        self._is_recovering = False
        self._changed = asyncio.Event()
        self._drained = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    def ready(self) -> None:
        """Accepts work from now on, or once the process has recovered."""
        if self.state is LifecycleState.STARTING:
            self._become(LifecycleState.RECOVERING if self._is_recovering else LifecycleState.READY)

    def recovering(self, is_recovering: bool) -> None:
        """Pauses accepting work (True), or resumes it (False); a process that starts will be ready accordingly."""
        self._is_recovering = is_recovering
        if is_recovering and self.state is LifecycleState.READY:
            self._become(LifecycleState.RECOVERING)
        elif not is_recovering and self.state is LifecycleState.RECOVERING:
            self._become(LifecycleState.READY)

    def drain(self) -> None:
        """Accepts no more work. No effect if repeated."""
        if self.state in (LifecycleState.STARTING, LifecycleState.READY, LifecycleState.RECOVERING):
            self._become(LifecycleState.DRAINING)
        self._drained.set()

    def stopped(self) -> None:
        self._become(LifecycleState.STOPPED)

    def require_ready(self) -> None:
        """Raises `UnavailableError` unless work is accepted."""
        if self.state is not LifecycleState.READY:
            raise UnavailableError(f"worker {self._name} is {self.state} and takes no new work", 1.0)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Counts work, for which draining waits, for the time of the block."""
        self.num_working += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.num_working -= 1
            if self.num_working == 0:
                self._idle.set()

    async def until_drained(self) -> None:
        """Waits until draining is requested; running work may not have ended."""
        await self._drained.wait()

    async def until_idle(self, timeout_s: float) -> bool:
        """Waits up to `timeout_s` for running work to end; returns whether it did."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        return self._idle.is_set()  # NOTE: with no time to wait it was not even asked

    async def changed_within(self, timeout_s: float) -> bool:
        """Waits up to `timeout_s` for the state to change; returns whether it did."""
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
