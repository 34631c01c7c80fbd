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

    def _reschedule(self, node: Any) -> None:
        """NOTE: a process begins a test when it knows the next, so it needs two, or to know that none is left."""
        super()._reschedule(node)
        if not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
            self._reschedule(node)

    def remove_node(self, node: Any) -> str | None:
        """Gives the tests that a dead process has not run to the others, apart from the test in which it died.

        NOTE: xdist would give away the finished files too, and the test that crashed.
        """
        files = self.assigned_work.pop(node)
        left = [(file, test) for file, tests in files.items() for test, is_done in tests.items() if not is_done]
        if not left:
            return None
        for file, test in left[1:]:
            self.workqueue.setdefault(file, {})[test] = False
        for other in self.assigned_work:
            self._reschedule(other)
        crashed: str = left[0][1]
        return crashed

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return next((room for room in WHOLE if file.startswith(room)), file)


def place(path: str) -> tuple[int, str]:
    """Sorts files: those with clusters come first."""
    found = (rank for rank, room in enumerate(CLUSTERS) if path.startswith(room))
    return next(found, len(CLUSTERS)), path
