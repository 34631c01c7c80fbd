"""Start-up times of replicas, measured from those that were observed to become ready.

Invariant: a replica counts once, when it first becomes ready; becoming ready again later is no start.
"""

from collections import deque
from collections.abc import Sequence
from statistics import median

from tandem.planner_service.targets import Replica

_MEMORY = 16
_MOST_S = 3600.0


class Startups:
    """Start-up times of one pool. Call `observe` for every observation of its replicas."""

    def __init__(self) -> None:
        self._durations_s: deque[float] = deque(maxlen=_MEMORY)
        self._starting: frozenset[str] = frozenset()
        self._known: frozenset[str] | None = None

    @property
    def typical_s(self) -> float | None:
        """Median of the latest start-up times in seconds; None if none was observed."""
        return median(self._durations_s) if self._durations_s else None

    def observe(self, replicas: Sequence[Replica]) -> None:
        """Record one observation of all replicas.

        NOTE: a replica that is ready when first seen counts only if it is new since the previous observation.
        """
        for replica in replicas:
            is_new = self._known is not None and replica.name not in self._known
            if replica.ready_s is not None and (replica.name in self._starting or is_new):
                duration_s = replica.ready_s - replica.created_s
                if 0 <= duration_s <= _MOST_S:
                    self._durations_s.append(duration_s)
        self._starting = frozenset(one.name for one in replicas if one.ready_s is None and self._is_first(one.name))
        self._known = frozenset(replica.name for replica in replicas)

    def _is_first(self, name: str) -> bool:
        """Whether the replica has never been observed to be ready."""
        return self._known is None or name not in self._known or name in self._starting
