"""Queue of requests for which no worker has capacity, as in an engine's own queue. Owned by one event loop.

Invariant: requests are served in order of arrival, so short prompts do not starve a long one; one level of priority
counts as one second of waiting. Only the first request in the queue asks a router for workers, so a full cluster costs
the routers a few calls a second however many wait. Routers decide between the queues of several gateways.
"""

import asyncio
from bisect import insort
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TypeVar

from prometheus_client import Gauge

from tandem.core.errors import CapacityError, NoRoomError, UnavailableError
from tandem.core.machine import random_id
from tandem.gateway.history import RequestRecord

LEVEL_S = 1.0  # seconds of waiting that one level of priority is worth
_MIN_PAUSE_S = 0.05  # between two calls of the first request; longer if the router asks for it
_MAX_PAUSE_S = 0.25

_is_counted: ContextVar[bool] = ContextVar("is_counted", default=False)  # whether this task's request is in the gauge

T = TypeVar("T")
Refusal = CapacityError | UnavailableError


@dataclass(order=True, slots=True)
class _Place:
    """A place in the queue, ordered by `since_s`: the time of arrival, adjusted by priority."""

    since_s: float
    number: int
    is_first: asyncio.Event = field(default_factory=asyncio.Event, compare=False)


class CapacityQueue:
    """A queue in front of one gateway's routers.

    Args:
        timeout_s: maximum wait in seconds; 0 = requests are refused at once.
        waiting: gauge of the number of waiting requests, in all queues that share it.
        waits_for: refusals after which a request waits.
        stage: name of the stage that records the wait.

    Attributes:
        name: random name by which routers know it; "" if requests never wait in it (`timeout_s` is 0).
    """

    def __init__(
        self,
        timeout_s: float,
        waiting: Gauge,
        waits_for: tuple[type[Refusal], ...] = (NoRoomError,),
        stage: str = "room",
    ) -> None:
        self._timeout_s = timeout_s
        self._waiting = waiting
        self._waits_for = waits_for
        self._stage = stage
        self._places: list[_Place] = []
        self._num_entered = 0
        self._refusal: Refusal = NoRoomError("no worker has room")
        self.name = random_id() if timeout_s else ""

    @property
    def is_empty(self) -> bool:
        return not self._places

    @property
    def others_wait(self) -> bool:
        """Whether requests wait behind the first one."""
        return len(self._places) > 1

    async def run(self, priority: int, call: Callable[[], Awaitable[T]], record: RequestRecord) -> T:
        """Returns the result of `call`, repeated at the head of the queue for as long as it raises one of
        `waits_for`.

        Args:
            priority: lower is more urgent.
            record: records the wait as a stage.

        Raises:
            CapacityError, UnavailableError: the last refusal, after `timeout_s`; also any other error that `call`
                raises.
        """
        if not self._places:
            try:
                return await call()
            except self._waits_for as error:
                if not self._timeout_s:
                    raise
                self._refusal = error
        with record.timed(self._stage):
            return await self._wait(priority, call)

    async def _wait(self, priority: int, call: Callable[[], Awaitable[T]]) -> T:
        place = self._enter(priority)
        try:
            async with asyncio.timeout(self._timeout_s):
                with self._counted():
                    while True:
                        await place.is_first.wait()
                        try:
                            return await call()
                        except self._waits_for as error:
                            self._refusal = error
                            await asyncio.sleep(min(max(_MIN_PAUSE_S, error.retry_after_s or 0.0), _MAX_PAUSE_S))
        except TimeoutError:
            message = f"{self._refusal}; the request has waited {self._timeout_s:g} s"
            raise type(self._refusal)(message, self._refusal.retry_after_s) from self._refusal
        finally:
            self._leave(place)

    def _enter(self, priority: int) -> _Place:
        self._num_entered += 1
        place = _Place(asyncio.get_running_loop().time() + priority * LEVEL_S, self._num_entered)
        if self._places and place < self._places[0]:
            self._places[0].is_first.clear()
        insort(self._places, place)
        self._tell_first()
        return place

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Counts this task's request as waiting; once, where the head of one queue waits in another."""
        if _is_counted.get():
            yield
            return
        before = _is_counted.set(True)
        self._waiting.inc()
        try:
            yield
        finally:
            self._waiting.dec()
            _is_counted.reset(before)

    def _leave(self, place: _Place) -> None:
        self._places.remove(place)
        self._tell_first()

    def _tell_first(self) -> None:
        if self._places:
            self._places[0].is_first.set()
