"""Detects dead workers, and ends the streams that wait for them.

A stream that is silent for the silence timeout makes its worker a suspect; one that does not answer a probe within the
probe timeout is lost. The check runs four times per silence timeout. Invariant: a slow worker that answers a probe is
left alone, however long its stream is silent. Each suspect gets one probe at a time. Never decides which worker a
request goes to next.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from tandem.core.clock import Clock
from tandem.core.errors import TandemError, WorkerLostError
from tandem.rpc.client import ClientPool, WorkerClient
from tandem.rpc.messages import WorkerAddress

CHECKS_PER_SILENCE = 4


class Listening:
    """One stream from one worker. `heard_s`: time of its last update; `lost`: reason why it was ended."""

    __slots__ = ("_timeout", "heard_s", "lost", "worker")

    def __init__(self, worker: WorkerAddress, timeout: asyncio.Timeout, now_s: float) -> None:
        self.worker = worker
        self.heard_s = now_s
        self.lost: str | None = None
        self._timeout = timeout

    def end(self, reason: str) -> None:
        """Interrupts the reader of this stream with TimeoutError; only the first call counts."""
        if self.lost is not None:
            return
        self.lost = reason
        self._timeout.reschedule(asyncio.get_running_loop().time())


class StallWatch:
    """Watches the worker streams of one event loop."""

    def __init__(self, pool: ClientPool[WorkerClient], clock: Clock, silent_after_s: float, timeout_s: float) -> None:
        self._pool = pool
        self._clock = clock
        self._silent_after_s = silent_after_s
        self._timeout_s = timeout_s
        self._streams: dict[Listening, None] = {}  # in order of their beginning
        self._asked: dict[WorkerAddress, asyncio.Task[None]] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="stall watch")

    async def close(self) -> None:
        tasks = [task for task in (self._task, *self._asked.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @contextmanager
    def listen(self, worker: WorkerAddress, timeout: asyncio.Timeout) -> Iterator[Listening]:
        """Watches a stream during the block, which must run under `timeout`."""
        stream = Listening(worker, timeout, self._clock.now_s())
        self._streams[stream] = None
        try:
            yield stream
        finally:
            del self._streams[stream]

    async def is_back(self, worker: WorkerAddress) -> bool:
        """Whether a lost worker answers a probe again, sent now: the same run of its process, ready for requests."""
        try:
            status = await self._pool.get(worker.address).status(timeout_s=self._timeout_s)
        except TandemError:
            return False
        return worker.incarnation in ("", status.worker.incarnation) and status.lifecycle == "ready"

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._silent_after_s / CHECKS_PER_SILENCE)
            silent_since_s = self._clock.now_s() - self._silent_after_s
            for worker in dict.fromkeys(s.worker for s in self._streams if s.heard_s <= silent_since_s):
                if worker not in self._asked:
                    self._asked[worker] = asyncio.create_task(self._ask(worker), name="sign of life")

    async def _ask(self, worker: WorkerAddress) -> None:
        asked_s = self._clock.now_s()
        try:
            status = await self._pool.get(worker.address).status(timeout_s=self._timeout_s)
        except WorkerLostError as error:
            self._end(worker, asked_s, f"worker {worker.worker_id} at {worker.address} went silent: {error}")
        except TandemError:  # a refusal shows that the process lives
            pass
        else:
            if worker.incarnation not in ("", status.worker.incarnation):
                self._end(worker, asked_s, f"worker {worker.worker_id} at {worker.address} was started again")
        finally:
            del self._asked[worker]

    def _end(self, worker: WorkerAddress, asked_s: float, reason: str) -> None:
        """Ends the worker's streams, except those with an update since the probe was sent."""
        for stream in self._streams:
            if stream.worker == worker and stream.heard_s < asked_s:
                stream.end(reason)
