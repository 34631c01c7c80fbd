"""Event queue of virtual time. Events of equal time run in the order in which they were added."""

import heapq
from collections.abc import Callable


class EventQueue:
    """Clock that jumps from event to event without real waiting."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0

    def at(self, time_s: float, happen: Callable[[], None]) -> None:
        """Schedule a call at `time_s`, or now if that has passed."""
        self._number += 1
        heapq.heappush(self._heap, (max(time_s, self.now_s), self._number, happen))

    def run(self) -> None:
        """Run until no event is left."""
        heap = self._heap
        while heap:
            self.now_s, _, happen = heapq.heappop(heap)
            happen()
