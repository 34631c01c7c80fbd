"""Background responses: they are generated without a client that waits, and polled from the store.

Invariant: each one is either running in this process, which then renews its lease in the store (the time for which it
counts as running), or has ended in the store. One that was cancelled or deleted through any gateway stops within
`BEAT_S`; one whose gateway stops is stored as failed.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.types import Receive, Send

from tandem.core.errors import TandemError
from tandem.gateway.errors import Problem
from tandem.gateway.openai.responses.dialect import ResponsesDialect
from tandem.gateway.openai.responses.store import ResponseStore

BEAT_S = 1.0  # seconds between two renewals of a running response's lease
_STOPPED = Problem(503, "service_unavailable_error", "unavailable", "this gateway stopped before the answer was done")

_logger = logging.getLogger(__name__)

Serve = Callable[[Receive, Send], Awaitable[None]]


class Job:
    """One background response, served like a connection of a client. `messages`: ASGI messages it was sent."""

    def __init__(self, dialect: ResponsesDialect, body: bytes) -> None:
        self.dialect = dialect
        self.messages: list[MutableMapping[str, Any]] = []
        self.is_called_off = False
        self._body: bytes | None = body
        self._left = asyncio.Event()

    async def receive(self) -> MutableMapping[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: MutableMapping[str, Any]) -> None:
        self.messages.append(message)

    def leave(self) -> None:
        """Stops the response as if its client had disconnected."""
        self._left.set()

    def call_off(self) -> None:
        """Stops a response whose final state is already in the store."""
        self.is_called_off = True
        self.leave()


class BackgroundResponses:
    """The background responses of this process. Owned by one event loop."""

    def __init__(self, store: ResponseStore, beat_s: float = BEAT_S) -> None:
        self._store = store
        self._beat_s = beat_s
        self._jobs: dict[asyncio.Task[None], Job] = {}

    @property
    def num_running(self) -> int:
        return len(self._jobs)

    async def begin(self, tenant: str, dialect: ResponsesDialect, body: bytes, serve: Serve) -> Job:
        """Starts a response. Returns once it is stored or was refused; in the latter case `dialect.queued` is None."""
        job = Job(dialect, body)
        queued = asyncio.Event()
        task = asyncio.create_task(self._run(tenant, job, serve, queued), name="background response")
        self._jobs[task] = job
        task.add_done_callback(self._done)
        await queued.wait()
        return job

    def call_off(self, response_id: str) -> None:
        """Stops a response that was cancelled or deleted in the store, if it runs here."""
        for job in self._jobs.values():
            if job.dialect.queued is not None and job.dialect.queued.response_id == response_id:
                job.call_off()

    def leave(self) -> None:
        """Stops all running responses, which are then marked failed; a `close` that waits for them goes on."""
        for job in self._jobs.values():
            job.leave()

    async def close(self, timeout_s: float = 0.0) -> None:
        """Waits up to `timeout_s` for running responses, then marks them failed and closes the store."""
        if self._jobs and timeout_s > 0:
            await asyncio.wait(tuple(self._jobs), timeout=timeout_s)
        self.leave()
        await asyncio.gather(*self._jobs, return_exceptions=True)
        await self._store.close()

    async def _run(self, tenant: str, job: Job, serve: Serve, queued: asyncio.Event) -> None:
        beating = asyncio.create_task(self._beat(tenant, job, queued), name="background beat")
        try:
            await serve(job.receive, job.send)
        finally:
            queued.set()
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)
            if job.dialect.queued is not None and not job.is_called_off:
                await job.dialect.abandon(_STOPPED)

    async def _beat(self, tenant: str, job: Job, queued: asyncio.Event) -> None:
        await job.dialect.is_queued.wait()
        queued.set()
        assert job.dialect.queued is not None
        response_id = job.dialect.queued.response_id
        while True:
            await asyncio.sleep(self._beat_s)
            try:
                if not await self._store.renew(tenant, response_id):
                    job.call_off()
                    return
            except TandemError as error:
                _logger.warning("background response %s is not renewed: %s", response_id, error)

    def _done(self, task: "asyncio.Task[None]") -> None:
        del self._jobs[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            _logger.error("a background response failed by a bug", exc_info=error)
