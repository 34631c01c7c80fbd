"""The end of a run's report: what was skipped and why, and the time that each room took."""

from collections import Counter
from collections.abc import Iterable, Sequence

import pytest


def room_of(node_id: str) -> str:
    """`tests/golden`, or `tests/unit/engine`: a unit is a room of its own."""
    folders = node_id.split("::")[0].split("/")[:-1]
    return "/".join(folders[: 3 if folders[1:2] == ["unit"] else 2])


def table_of(reports: Iterable[pytest.TestReport]) -> list[str]:
    """Lines: seconds and tests of each room, the slowest first. Set-up and tear-down count."""
    seconds: Counter[str] = Counter()
    tests: Counter[str] = Counter()
    for report in reports:
        room = room_of(report.nodeid)
        seconds[room] += report.duration  # type: ignore[assignment]  # NOTE: counters of floats work as well
        tests[room] += report.when == "call"
    return [f"{taken:7.1f} s  {tests[room]:5d} tests  {room}" for room, taken in seconds.most_common()]


def reasons_of(skipped: Sequence[pytest.TestReport]) -> list[str]:
    """Lines: how many tests were skipped for each reason, the most first."""
    told = [each.longrepr[2] if isinstance(each.longrepr, tuple) else str(each.longrepr) for each in skipped]
    reasons = Counter(reason.removeprefix("Skipped: ") for reason in told)
    return [f"{number:5d} skipped: {reason}" for reason, number in reasons.most_common()]
