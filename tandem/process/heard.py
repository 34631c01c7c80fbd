"""Rule for the workers that a gateway lists at GET /admin/workers: whether one reports, whatever its state."""

from collections.abc import Mapping
from typing import Any

SILENT_S = 2.0  # without a report, after which a worker is gone


def is_heard(worker: Mapping[str, Any]) -> bool:
    """Whether a listed worker reports.

    NOTE: `is_alive` means that it is given requests; one that starts, drains or recovers is not, and may run some.
    """
    if worker.get("is_alive"):
        return True
    state, age_s = worker.get("state"), worker.get("age_s")
    return isinstance(state, str) and state != "ready" and isinstance(age_s, int | float) and age_s <= SILENT_S
