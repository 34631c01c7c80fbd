"""Detects that another autoscaler changed the replicas this planner set. Reads no clock, does no I/O.

Invariant: after such a change the pool is left alone for a while, longer each time, so that two autoscalers do not
keep undoing each other's changes.
"""

_MOST_DOUBLINGS = 4


class Claim:
    """The number of replicas that this planner set for one pool, as long as no other writer changes it.

    `yield_s`: time for which the pool is left alone after the first change by another writer.
    """

    def __init__(self, yield_s: float) -> None:
        self._yield_s = yield_s
        self._asked: int | None = None
        self._asked_at_s = 0.0
        self._num_broken = 0
        self._until_s = float("-inf")

    @property
    def yields_for_s(self) -> float:
        """Seconds for which the latest change by another autoscaler is respected."""
        return float(self._yield_s * 2 ** min(_MOST_DOUBLINGS, max(0, self._num_broken - 1)))

    def acquire(self, num_replicas: int, now_s: float) -> None:
        """Records that this planner set `num_replicas`."""
        self._asked, self._asked_at_s = num_replicas, now_s

    def release(self) -> None:
        """Forgets the number set last, because it is not known who set the current one."""
        self._asked = None

    def is_broken_by(self, num_wanted: int, now_s: float) -> bool:
        """Whether another autoscaler has set `num_wanted` since this planner wrote; if so, starts the time to yield."""
        if self._asked is None or num_wanted == self._asked:
            self._forgive(now_s)
            return False
        self._num_broken += 1
        self._asked = num_wanted
        self._asked_at_s = now_s
        self._until_s = now_s + self.yields_for_s
        return True

    def yields(self, now_s: float) -> bool:
        """Whether the pool is left to another autoscaler now."""
        return now_s < self._until_s

    def _forgive(self, now_s: float) -> None:
        """Reset the growth of the time to yield if no other writer has interfered for long."""
        if self._num_broken and self._asked is not None and now_s - self._asked_at_s > 4 * self.yields_for_s:
            self._num_broken = 0
