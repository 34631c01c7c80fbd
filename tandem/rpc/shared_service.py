"""Worker side of a shared stream: serves each of its requests with `WorkerHandler.generate`, in a task of its own.

Invariant: when the stream ends, for any reason, all its requests are cancelled and have ended before anything else
happens. An error of one request is reported to its caller and concerns no other.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable

import grpc

from tandem.core.errors import InvalidRequestError, WorkerLostError
from tandem.rpc import methods
from tandem.rpc.context import incoming_traceparent
from tandem.rpc.messages import GenerateCall, GenerateUpdate
from tandem.rpc.serve_messages import CallStatus, RequestStart, ServeCall, ServeUpdate
from tandem.rpc.shared_outbox import SharedOutbox
from tandem.rpc.status import status_of

logger = logging.getLogger(__name__)


class SharedService:
    """Serves the requests of one shared stream. `generate`: as `WorkerHandler.generate`."""

    def __init__(self, generate: Callable[[GenerateCall], AsyncIterator[GenerateUpdate]]) -> None:
        self._generate = generate
        self._outbox = SharedOutbox()
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def respond(self, calls: AsyncIterator[ServeCall]) -> AsyncGenerator[ServeUpdate, None]:
        """Serves the requests that `calls` start; yields their updates until `calls` end.

        Raises:
            InvalidRequestError: a call is invalid.
        """
        reader = asyncio.create_task(self._read(calls), name="shared stream")
        reader.add_done_callback(lambda _: self._outbox.wake())
        try:
            while True:
                await self._outbox.wait()
                if reader.done():
                    reader.result()
                    return
                yield self._outbox.drain()
        finally:
            tasks = [reader, *self._tasks.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, calls: AsyncIterator[ServeCall]) -> None:
        async for call in calls:
            for start in call.starts:
                self._open(start)
            for credit in call.credits:
                self._outbox.add_credit(credit.number, credit.num_tokens)
            for number in call.left:
                if (task := self._tasks.get(number)) is not None:
                    task.cancel()

    def _open(self, start: RequestStart) -> None:
        if start.number in self._tasks:
            raise InvalidRequestError(f"number={start.number} is taken by a request that has not ended")
        self._outbox.open(start.number, start.credit)
        task = asyncio.create_task(self._serve(start), name="shared request")
        self._tasks[start.number] = task
        task.add_done_callback(lambda _: self._forget(start.number))

    def _forget(self, number: int) -> None:
        del self._tasks[number]
        self._outbox.forget(number)

    async def _serve(self, start: RequestStart) -> None:
        incoming_traceparent.set(start.traceparent or None)
        request_id = "-"
        try:
            call = methods.GENERATE.request.decode(start.call)
            request_id = call.request_id
            await self._pass_on(start.number, call)
        except (Exception, asyncio.CancelledError) as error:  # NOTE: whatever a handler raises is sent to its caller
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise asyncio.CancelledError from error
            self._outbox.end(start.number, _status_of(error, request_id))
        else:
            self._outbox.end(start.number, CallStatus())

    async def _pass_on(self, number: int, call: GenerateCall) -> None:
        answers = self._generate(call)
        try:
            async for update in answers:
                await self._outbox.put(number, update)
                await asyncio.sleep(0)  # NOTE: one that never waits must not hold up others, nor its own first word
        finally:
            close = getattr(answers, "aclose", None)
            if close is not None:
                await close()


def _status_of(error: BaseException, request_id: str) -> CallStatus:
    """Returns the status that reports an error; unexpected errors are bugs, so they are logged."""
    if isinstance(error, asyncio.CancelledError):
        error = WorkerLostError("Generate was cancelled by the process that served it")
    status = status_of(error)
    if status.code == grpc.StatusCode.INTERNAL.value[0]:
        logger.error("Generate failed; request %s", request_id, exc_info=error)
    return status
