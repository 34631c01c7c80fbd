"""Check that a pool still has the replicas that we asked for. Reads no clock and acts on nothing.

Invariant: once somebody else has changed them, we leave the pool alone for a while, longer each time, so that two
autoscalers never pull at it in turns.
"""

_MOST_DOUBLINGS = 4


class Claim:
    """On one pool. `yield_s`: for how long it is left alone at first."""

    def __init__(self, yield_s: float) -> None:
        self._yield_s = yield_s
        self._asked: int | None = None
        self._asked_at_s = 0.0
        self._num_broken = 0
        self._until_s = float("-inf")

    @property
    def yields_for_s(self) -> float:
        """Time for which the last change by somebody else is respected."""
        return float(self._yield_s * 2 ** min(_MOST_DOUBLINGS, max(0, self._num_broken - 1)))

    def take(self, num_replicas: int, now_s: float) -> None:
        """We asked for so many."""
        self._asked, self._asked_at_s = num_replicas, now_s

    def drop(self) -> None:
        """Forgets the owner: the number asked for now may be anybody's."""
        self._asked = None

    def is_broken_by(self, num_wanted: int, now_s: float) -> bool:
        """Whether somebody else has asked for `num_wanted` since we did; then it is theirs for a while."""
        if self._asked is None or num_wanted == self._asked:
            self._forgive(now_s)
            return False
        self._num_broken += 1
        self._asked = num_wanted
        self._asked_at_s = now_s
        self._until_s = now_s + self.yields_for_s
        return True

    def yields(self, now_s: float) -> bool:
        """Whether it is somebody else's now."""
        return now_s < self._until_s

    def _forgive(self, now_s: float) -> None:
        """Nobody has interfered for long."""
        if self._num_broken and self._asked is not None and now_s - self._asked_at_s > 4 * self.yields_for_s:
            self._num_broken = 0
