"""Virtual time: what happens next, in order. Equal times happen in the order they were asked for."""

import heapq
from collections.abc import Callable


class EventQueue:
    """A clock that jumps from event to event; nothing waits for real."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0

    def at(self, time_s: float, happen: Callable[[], None]) -> None:
        """Let something happen; never before now."""
        self._number += 1
        heapq.heappush(self._heap, (max(time_s, self.now_s), self._number, happen))

    def run(self) -> None:
        """Until nothing is left to happen."""
        heap = self._heap
        while heap:
            self.now_s, _, happen = heapq.heappop(heap)
            happen()
