"""The serving core that every dialect shares: serves a `ServeRequest` and yields updates, across worker failures.

Each choice (one answer to one prompt) is a `Journey` of its own. Invariant: leaving a stream, for any reason, cancels
every call made for it and reports the end of every choice to its router once.
"""

import asyncio
from collections.abc import Sequence
from types import TracebackType

from tandem.core.errors import UnavailableError
from tandem.core.output import RequestOutput
from tandem.gateway.history import RequestRecord
from tandem.gateway.journey import Journey, JourneyContext
from tandem.gateway.pace import StreamPacer
from tandem.gateway.request import ServeRequest
from tandem.gateway.settler import Settler, settlement_of
from tandem.gateway.update_queue import UpdateQueue

LINGER_S = 1.0  # for the streams of workers to close after the last token


class ServeStream:
    """One request being served, as `async with`; call `next_updates` until it returns nothing."""

    def __init__(
        self,
        context: JourneyContext,
        settler: Settler,
        open_streams: "set[ServeStream]",
        request: ServeRequest,
        record: RequestRecord,
    ) -> None:
        self._context = context
        self._settler = settler
        self._open_streams = open_streams
        self._request = request
        self._record = record
        self._queue = UpdateQueue()
        self._num_unfinished = len(request.choices)
        self._journeys = [Journey(context, request, choice, record, self._queue) for choice in request.choices]
        self._tasks: list[asyncio.Task[None]] = []
        self._is_settled = False

    async def __aenter__(self) -> "ServeStream":
        self._open_streams.add(self)
        self._context.metrics.running.inc(len(self._journeys))
        for choice in self._request.choices:
            self._context.metrics.observe_arrival(len(choice.prompt_token_ids))
        self._tasks = [asyncio.create_task(journey.run(), name="journey") for journey in self._journeys]
        for task in self._tasks:
            task.add_done_callback(self._note_failure)
        return self

    async def next_updates(self, pace: StreamPacer | None = None) -> Sequence[RequestOutput]:
        """New updates; empty when every choice has ended. `pace`: limits how often it returns.

        Raises:
            TandemError: a choice cannot be served, or not to its end.
        """
        if not self._num_unfinished:
            return ()
        outputs = await self._queue.get(pace)
        self._num_unfinished -= sum(item.finish_reason is not None for item in outputs)
        if not self._num_unfinished:
            self._settle(None)
        return outputs

    def fail(self, reason: str) -> None:
        """Ends the request with an error that its client receives."""
        self._queue.fail(UnavailableError(reason, 1.0))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if not self._num_unfinished:
                await asyncio.wait(self._tasks, timeout=LINGER_S)
        finally:
            for task in self._tasks:
                task.cancel()
            if not self._is_settled:
                self._settle(None if isinstance(error, asyncio.CancelledError) else error)
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _note_failure(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._queue.fail(error)

    def _settle(self, error: BaseException | None) -> None:
        """Ends the record and reports all choices' ends to routers.

        NOTE: done before the client gets the last update, so that it can ask for the request's history at once.
        """
        self._is_settled = True
        self._open_streams.discard(self)
        self._context.metrics.running.dec(len(self._journeys))
        if not self._num_unfinished:
            self._record.close("done")
        for journey, choice in zip(self._journeys, self._request.choices, strict=True):
            end = journey.end(error)
            self._record.end_choice(end)
            self._context.metrics.observe_end(end)
            if journey.router is not None:
                self._settler.add(journey.router, settlement_of(choice.request_id, journey.pairing_id, end))
