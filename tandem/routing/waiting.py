"""Order in which requests that wait at several gateways get free room, decided by the router that all gateways ask.

A question is a `pair` call of the request at the front of a queue; a gateway repeats it until there is room. Invariant:
of each queue only the last question is kept, and for `KEPT_S` at most. So a request that left, or whose gateway died,
keeps room from others no longer than that, however many leave. Owned by one thread; does no I/O.
"""

from dataclasses import dataclass

from tandem.routing.fleet import Fleet
from tandem.routing.queue_place import QueuePlace
from tandem.routing.snapshot import RequestShape

KEPT_S = 0.5  # NOTE: twice the longest pause between two questions of a queue
TOLERATED_S = 1.0  # by which a request must have waited longer than another one to go first


@dataclass(frozen=True, slots=True)
class _Question:
    """A queue's last question. `since_s`: when its request began to wait."""

    request: RequestShape
    is_retry: bool
    since_s: float
    asked_at_s: float

    def precedes(self, place: QueuePlace, now_s: float) -> bool:
        if self.is_retry != place.is_retry:
            return self.is_retry
        return self.since_s + TOLERATED_S < now_s - place.waited_s


class WaitingRequests:
    """Last questions of all queues, each for the request that waits at its front."""

    def __init__(self) -> None:
        self._questions: dict[str, _Question] = {}

    def __len__(self) -> int:
        return len(self._questions)

    def asked(self, place: QueuePlace, request: RequestShape, now_s: float, *, lacks_room: bool) -> None:
        """Record a question. Until its queue asks again, other queues leave room for it if it got none (`lacks_room`)
        or if more requests wait behind it.
        """
        self._questions.pop(place.queue, None)
        if place.queue and (lacks_room or place.others_wait):
            self._questions[place.queue] = _Question(request, place.is_retry, now_s - place.waited_s, now_s)

    def reserved(self, place: QueuePlace, request: RequestShape, fleet: Fleet, now_s: float) -> frozenset[str]:
        """Ids of the decode workers that could serve this request but are reserved for requests of other queues.
        Retries go first, then requests that have waited more than `TOLERATED_S` longer.

        NOTE: with a strict order, room would go unused until the request that is next asks again.
        """
        for queue in [key for key, one in self._questions.items() if one.asked_at_s < now_s - KEPT_S]:
            del self._questions[queue]
        others = [one for queue, one in self._questions.items() if queue != place.queue and one.precedes(place, now_s)]
        if not others:
            return frozenset()
        able = frozenset[str]().union(*(fleet.able_ids(one.request, now_s) for one in others))
        return able & fleet.able_ids(request, now_s)
