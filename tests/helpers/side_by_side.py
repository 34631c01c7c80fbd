"""Divides tests among processes: those that start clusters run one after another in one process, beside all others.

A cluster's tests wait on processes and clocks of their own. Two clusters on the cores of one would be late for each
other's time-outs; a cluster beside one process that computes is not.
"""

from typing import Any

from xdist.scheduler import LoadFileScheduling

CLUSTERS = ("tests/faults/", "tests/e2e/", "tests/skew/", "tests/unit/worker/", "tests/unit/gateway/")
"""Rooms whose tests start processes and wait for them, the most sensitive to time first."""
WHOLE = ("tests/helm/",)
"""Rooms whose files share what is kept in their process: every render of the chart."""
_FIRST = "gw0"


class FromBothEnds(LoadFileScheduling):  # type: ignore[misc]  # NOTE: xdist has no types
    """Files in one order: the first process takes them from its beginning, the others from its end."""

    def _assign_work_unit(self, node: Any) -> None:
        is_first = node.gateway.id == _FIRST
        chosen = min(self.workqueue, key=place) if is_first else max(self.workqueue, key=place)
        self.workqueue.move_to_end(chosen, last=False)
        super()._assign_work_unit(node)

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return next((room for room in WHOLE if file.startswith(room)), file)


def place(path: str) -> tuple[int, str]:
    """Sorts files: those with clusters come first."""
    found = (rank for rank, room in enumerate(CLUSTERS) if path.startswith(room))
    return next(found, len(CLUSTERS)), path
