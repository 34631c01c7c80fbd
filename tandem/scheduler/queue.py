"""Queue of waiting requests, most urgent first, with aging.

A request's order (the least is the most urgent) is `priority * aging_steps + step of arrival`: a fixed number, yet it
makes every request one priority level more urgent for each `aging_steps` steps it waits. So nothing starves, and the
order of two requests never changes.
"""

import heapq

from tandem.scheduler.request import Request, RequestState

MAX_STALE_ENTRIES = 64  # of finished requests, kept beside those that wait


class WaitingQueue:
    """Heap by `Request.order`. Requests that finish while they wait are skipped when they reach the top."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Request]] = []
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def push(self, request: Request) -> None:
        heapq.heappush(self._heap, (request.order, request))
        self._num_waiting += 1

    def pop(self) -> Request | None:
        """The most urgent waiting request, or None."""
        while self._heap:
            _, request = heapq.heappop(self._heap)
            if request.state is RequestState.WAITING:
                self._num_waiting -= 1
                return request
        return None

    def forget(self, request: Request) -> None:
        """Account for a request that finished while waiting; its state must have been changed before."""
        assert request.state is not RequestState.WAITING
        self._num_waiting -= 1
        if len(self._heap) > 2 * self._num_waiting + MAX_STALE_ENTRIES:
            self._heap = [entry for entry in self._heap if entry[1].state is RequestState.WAITING]
            heapq.heapify(self._heap)
