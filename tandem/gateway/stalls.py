"""Detects dead workers, and ends the streams that wait for them.

A stream that is silent for the silence timeout makes its worker a suspect; one that does not answer a probe within the
probe timeout is lost. The check runs four times per silence timeout. Invariant: a slow worker that answers a probe is
left alone, however long its stream is silent. Each suspect gets one probe at a time. A worker that was lost, and to
which requests return because there is no other, is waited for longer while its probes are slow. Never decides which
worker a request goes to next.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from tandem.core.clock import Clock
from tandem.core.errors import TandemError, WorkerLostError
from tandem.gateway.patience import Patience
from tandem.rpc.client import ClientPool, WorkerClient
from tandem.rpc.messages import WorkerAddress

CHECKS_PER_SILENCE = 4
_MAX_RETURNS = 256  # lost workers whose return is looked for
_FRESH_S = 1.0  # for which the answer of a probe counts that came while nobody waited for it
_REMEMBERED_S = 60.0  # for which a lost worker that answered slowly counts as slow


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


class _Return:
    """Return of one lost worker. `probe` tells whether it is ready; `ended_s`: time of the latest answer or failure."""

    __slots__ = ("ended_s", "patience", "probe")

    def __init__(self, patience: Patience) -> None:
        self.patience = patience
        self.probe: asyncio.Task[bool] | None = None
        self.ended_s = 0.0


class StallWatch:
    """Watches the worker streams of one event loop.

    Args:
        timeout_s: of a probe.
        max_timeout_s: of a probe of a worker that was lost, is slow to answer, and is the only one.
    """

    def __init__(
        self,
        pool: ClientPool[WorkerClient],
        clock: Clock,
        silent_after_s: float,
        timeout_s: float,
        max_timeout_s: float = 0.0,
    ) -> None:
        self._pool = pool
        self._clock = clock
        self._silent_after_s = silent_after_s
        self._timeout_s = timeout_s
        self._max_timeout_s = max_timeout_s
        self._returns: dict[WorkerAddress, _Return] = {}  # in order of their beginning
        self._streams: dict[Listening, None] = {}  # in order of their beginning
        self._asked: dict[WorkerAddress, asyncio.Task[None]] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="stall watch")

    async def close(self) -> None:
        probes = [each.probe for each in self._returns.values()]
        tasks = [task for task in (self._task, *self._asked.values(), *probes) if task is not None]
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
        """Whether a lost worker answers a probe again: the same run of its process, ready for requests.

        Waits for `timeout_s`. A probe that takes longer goes on meanwhile, and a later call returns its answer.
        """
        found, now_s = self._return_of(worker), self._clock.now_s()
        probe = found.probe
        if probe is None or (probe.done() and not (probe.result() and now_s < found.ended_s + _FRESH_S)):
            probe = found.probe = asyncio.create_task(self._probe(worker, found), name="probe of a lost worker")
        await asyncio.wait({probe}, timeout=self._timeout_s)
        if not probe.done():
            return False
        if found.probe is probe:
            found.probe = None
        is_back = not probe.cancelled() and probe.result()
        if is_back and found.patience.timeout_s > self._timeout_s:
            self._ask_soon(worker)  # NOTE: it may have stood still until now, and be quick again
        return is_back

    def _return_of(self, worker: WorkerAddress) -> _Return:
        found = self._returns.get(worker)
        if found is None:
            while len(self._returns) >= _MAX_RETURNS:
                oldest = self._returns.pop(next(iter(self._returns)))
                if oldest.probe is not None:
                    oldest.probe.cancel()
            found = self._returns[worker] = _Return(Patience(self._timeout_s, self._max_timeout_s))
        return found

    async def _probe(self, worker: WorkerAddress, found: _Return) -> bool:
        asked_s = self._clock.now_s()
        try:
            status = await self._pool.get(worker.address).status(timeout_s=found.patience.timeout_s)
        except TandemError:
            found.patience.note_silence(self._clock.now_s() - asked_s)
            return False
        else:
            found.patience.note_answer(self._clock.now_s() - asked_s)
            return worker.incarnation in ("", status.worker.incarnation) and status.lifecycle == "ready"
        finally:
            found.ended_s = self._clock.now_s()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._silent_after_s / CHECKS_PER_SILENCE)
            silent_since_s = self._clock.now_s() - self._silent_after_s
            for worker in dict.fromkeys(s.worker for s in self._streams if s.heard_s <= silent_since_s):
                self._ask_soon(worker)

    def _ask_soon(self, worker: WorkerAddress) -> None:
        if worker not in self._asked:
            self._asked[worker] = asyncio.create_task(self._ask(worker), name="sign of life")

    async def _ask(self, worker: WorkerAddress) -> None:
        asked_s, found = self._clock.now_s(), self._returns.get(worker)
        if found is not None and asked_s > found.ended_s + _REMEMBERED_S:
            found = None
        timeout_s = self._timeout_s if found is None else found.patience.timeout_s
        try:
            status = await self._pool.get(worker.address).status(timeout_s=timeout_s)
        except WorkerLostError as error:
            self._end(worker, asked_s, f"worker {worker.worker_id} at {worker.address} went silent: {error}")
        except TandemError:  # a refusal shows that the process lives
            pass
        else:
            if found is not None:
                found.ended_s = self._clock.now_s()
                found.patience.note_answer(found.ended_s - asked_s)
            if worker.incarnation not in ("", status.worker.incarnation):
                self._end(worker, asked_s, f"worker {worker.worker_id} at {worker.address} was started again")
        finally:
            del self._asked[worker]

    def _end(self, worker: WorkerAddress, asked_s: float, reason: str) -> None:
        """Ends the worker's streams, except those with an update since the probe was sent."""
        for stream in self._streams:
            if stream.worker == worker and stream.heard_s < asked_s:
                stream.end(reason)
