"""The end of a run's report: what was skipped and why, and the time that each room and the costliest files took."""

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

PROCESSOR_S = "processor_s"
"""Attribute of a report, which comes with it from other processes too."""
_NUM_FILES = 15
_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


def processor_s(server_pid: int | None = None) -> float:
    """Processor time so far of this process and of its children that have ended; a server's and its children's too."""
    spent = os.times()
    own = spent.user + spent.system + spent.children_user + spent.children_system
    if server_pid is None:
        return own
    try:
        fields = Path(f"/proc/{server_pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return own
    return own + sum(map(int, fields[11:15])) / _TICKS


def room_of(node_id: str) -> str:
    """`tests/golden`, or `tests/unit/engine`: a unit is a room of its own."""
    folders = node_id.split("::")[0].split("/")[:-1]
    return "/".join(folders[: 3 if folders[1:2] == ["unit"] else 2])


def table_of(reports: Iterable[pytest.TestReport]) -> list[str]:
    """Lines: seconds, processor-seconds and tests of each room, the slowest first. Set-up and tear-down count."""
    seconds: Counter[str] = Counter()
    spent: defaultdict[str, float] = defaultdict(float)
    tests: Counter[str] = Counter()
    for report in reports:
        room = room_of(report.nodeid)
        seconds[room] += report.duration  # type: ignore[assignment]  # NOTE: counters of floats work as well
        spent[room] += getattr(report, PROCESSOR_S, 0.0)
        tests[room] += report.when == "call"
    return [
        f"{taken:7.1f} s  {spent[room]:7.1f} processor-s  {tests[room]:5d} tests  {room}"
        for room, taken in seconds.most_common()
    ]


def costliest_of(reports: Iterable[pytest.TestReport]) -> list[str]:
    """Lines: the files that took most processor time."""
    spent: defaultdict[str, float] = defaultdict(float)
    for report in reports:
        spent[report.nodeid.partition("::")[0]] += getattr(report, PROCESSOR_S, 0.0)
    costliest = sorted(spent.items(), key=lambda item: item[1], reverse=True)[:_NUM_FILES]
    return [f"{taken:7.1f} processor-s  {file}" for file, taken in costliest if taken >= 1]


def reasons_of(skipped: Sequence[pytest.TestReport]) -> list[str]:
    """Lines: how many tests were skipped for each reason, the most first."""
    told = [each.longrepr[2] if isinstance(each.longrepr, tuple) else str(each.longrepr) for each in skipped]
    reasons = Counter(reason.removeprefix("Skipped: ") for reason in told)
    return [f"{number:5d} skipped: {reason}" for reason, number in reasons.most_common()]
