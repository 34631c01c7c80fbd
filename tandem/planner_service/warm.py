"""Filters out measurements of cold workers: compilation and empty caches distort their speed."""

import contextlib
from collections.abc import AsyncGenerator
from dataclasses import replace

from tandem.core.clock import Clock
from tandem.process.fleet_watch import Watchable
from tandem.rpc.messages import WorkerStatus

_MAX_KNOWN = 65_536


class WarmSamples:
    """Drops samples of workers' first seconds of work; shared by a planner's watches."""

    def __init__(self, clock: Clock, warmup_s: float) -> None:
        self._clock = clock
        self._warmup_s = warmup_s
        self._first_s: dict[str, float] = {}

    def filtered(self, status: WorkerStatus) -> WorkerStatus:
        """Returns the status without samples of the worker's first seconds of work."""
        if not status.prefill_samples and not status.step_samples:
            return status
        now_s, key = self._clock.now_s(), f"{status.worker.worker_id} {status.worker.incarnation}"
        if key not in self._first_s and len(self._first_s) >= _MAX_KNOWN:
            del self._first_s[next(iter(self._first_s))]
        if now_s - self._first_s.setdefault(key, now_s) >= self._warmup_s:
            return status
        return replace(status, prefill_samples=(), step_samples=())


class WarmClient:
    """Wraps the client of one worker (`process.fleet_watch.Watchable`); its updates are filtered by `WarmSamples`."""

    def __init__(self, client: Watchable, samples: WarmSamples) -> None:
        self._client = client
        self._samples = samples

    async def watch(self, interval_s: float) -> AsyncGenerator[WorkerStatus, None]:
        async with contextlib.aclosing(self._client.watch(interval_s)) as updates:
            async for status in updates:
                yield self._samples.filtered(status)

    async def close(self) -> None:
        await self._client.close()
