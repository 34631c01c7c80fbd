"""Queue of requests that cannot be paired with workers now: all that could serve them are full, or there are none.

Invariants: requests are served in order of arrival, so short prompts do not starve a long one; one level of priority
counts as one second of waiting. Only the first request in the queue asks a router for workers, so a full or lost
cluster costs the routers a few calls a second however many wait. The last answer tells what all of them wait for, so
one clock decides when each gives up. Routers decide between the queues of several gateways. Owned by one event loop.
"""

import asyncio
from bisect import insort
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeVar

from prometheus_client import Gauge

from tandem.core.errors import CapacityError, UnavailableError
from tandem.core.machine import random_id
from tandem.gateway.history import RequestRecord

LEVEL_S = 1.0  # seconds of waiting that one level of priority is worth
_MIN_PAUSE_S = 0.05  # between two calls of the first request; longer if the router asks for it
_MAX_PAUSE_S = 0.25

T = TypeVar("T")
Refusal = CapacityError | UnavailableError


class _Lack(StrEnum):
    """Lack of what requests wait for; the value names the stage that records the wait."""

    ROOM = "room"
    WORKERS = "outage"


@dataclass(frozen=True, slots=True)
class QueueTimeouts:
    """Longest waits of requests, in seconds; 0 = they do not wait.

    Args:
        full: refusal of workers that have no room.
        room_s: for room, since the request came to the queue.
        outage_s: for a worker, since the outage began, or since the request came if that was later.
    """

    full: type[CapacityError]
    room_s: float
    outage_s: float

    @property
    def refusals(self) -> tuple[type[Refusal], ...]:
        """Refusals after which requests wait."""
        full = (self.full,) if self.room_s else ()
        return (*full, UnavailableError) if self.outage_s else full


@dataclass(order=True, slots=True)
class _Place:
    """A place in the queue, ordered by `since_s`: the time of arrival, adjusted by priority."""

    since_s: float
    number: int
    arrived_s: float = field(compare=False)
    record: RequestRecord = field(compare=False)
    timeout: asyncio.Timeout = field(compare=False)
    stage: ExitStack = field(default_factory=ExitStack, compare=False)
    is_first: asyncio.Event = field(default_factory=asyncio.Event, compare=False)

    def set_deadline(self, deadline_s: float | None) -> None:
        if not self.timeout.expired():
            self.timeout.reschedule(deadline_s)

    def begin_stage(self, name: str) -> None:
        self.stage.close()
        self.stage.enter_context(self.record.timed(name))


class PairingQueue:
    """A queue in front of one gateway's routers. `waiting`: gauge of the requests in all queues that share it.

    Attributes:
        name: random name by which routers keep room for its first request; "" if requests do not wait for room.
    """

    def __init__(self, timeouts: QueueTimeouts, waiting: Gauge) -> None:
        self._timeouts = timeouts
        self._waiting = waiting
        self._places: list[_Place] = []
        self._num_entered = 0
        self._refusal: Refusal = UnavailableError("nobody was asked yet")
        self._lack: _Lack | None = None  # of the last refusal; None once a request was served after an outage
        self._lacks_since_s = 0.0
        self.name = random_id() if timeouts.room_s else ""

    @property
    def is_empty(self) -> bool:
        return not self._places

    @property
    def others_wait(self) -> bool:
        """Whether requests wait behind the first one."""
        return len(self._places) > 1

    async def run(self, priority: int, call: Callable[[], Awaitable[T]], record: RequestRecord) -> T:
        """Returns the result of `call`, repeated at the head of the queue while it is refused.

        Args:
            priority: lower is more urgent.
            record: records the wait in stages: `room` while workers are full, `outage` while there are none.

        Raises:
            CapacityError, UnavailableError: the last refusal, after the timeout; also any other error that
                `call` raises.
        """
        if not self._places:
            try:
                return await call()
            except self._timeouts.refusals as error:
                self._refused(error)
        arrived_s = _now_s()
        timeout = asyncio.timeout(None)
        try:
            async with timeout:
                place = self._enter(arrived_s, priority, record, timeout)
                try:
                    return await self._wait(place, call)
                finally:
                    self._leave(place)
        except TimeoutError:
            if not timeout.expired():
                raise
            message = f"{self._refusal}; the request has waited {(timeout.when() or arrived_s) - arrived_s:.3g} s"
            raise type(self._refusal)(message, self._refusal.retry_after_s) from self._refusal

    async def _wait(self, place: _Place, call: Callable[[], Awaitable[T]]) -> T:
        while True:
            await place.is_first.wait()
            try:
                result = await call()
            except self._timeouts.refusals as error:
                self._refused(error)
                await asyncio.sleep(min(max(_MIN_PAUSE_S, error.retry_after_s or 0.0), _MAX_PAUSE_S))
            else:
                self._served()
                return result

    def _refused(self, error: Refusal) -> None:
        self._refusal = error
        lack = _Lack.ROOM if isinstance(error, CapacityError) else _Lack.WORKERS
        if lack is not self._lack:
            self._lack, self._lacks_since_s = lack, _now_s()
            for place in self._places:
                place.begin_stage(lack)
                place.set_deadline(self._deadline_s(place))

    def _served(self) -> None:
        """NOTE: after an outage, all others get time to ask."""
        if self._lack is _Lack.WORKERS:
            self._lack = None
            for place in self._places:
                place.set_deadline(None)

    def _deadline_s(self, place: _Place) -> float | None:
        if self._lack is None:
            return None
        if self._lack is _Lack.ROOM:
            return place.arrived_s + self._timeouts.room_s
        return max(place.arrived_s, self._lacks_since_s) + self._timeouts.outage_s

    def _enter(self, arrived_s: float, priority: int, record: RequestRecord, timeout: asyncio.Timeout) -> _Place:
        self._num_entered += 1
        place = _Place(arrived_s + priority * LEVEL_S, self._num_entered, arrived_s, record, timeout)
        place.begin_stage(self._lack or _Lack.ROOM)
        place.set_deadline(self._deadline_s(place))
        if self._places and place < self._places[0]:
            self._places[0].is_first.clear()
        insort(self._places, place)
        self._waiting.inc()
        self._tell_first()
        return place

    def _leave(self, place: _Place) -> None:
        self._places.remove(place)
        self._waiting.dec()
        place.stage.close()
        self._tell_first()

    def _tell_first(self) -> None:
        if self._places:
            self._places[0].is_first.set()


def _now_s() -> float:
    return asyncio.get_running_loop().time()
