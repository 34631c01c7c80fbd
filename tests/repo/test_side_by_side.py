"""Division of tests among processes, and the end of their report."""

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from _pytest.reports import TestReport

from tests.faults.matrix import Row, property_of, rows_of
from tests.helpers.rooms import PROCESSOR_S, costliest_of, processor_s, reasons_of, room_of, table_of
from tests.helpers.side_by_side import FromBothEnds, place

FILES = (
    *("contract/test_a", "e2e/test_b", "faults/test_c", "golden/test_d", "helm/test_e", "helm/test_f"),
    *("unit/engine/test_g", "unit/worker/test_h"),
)
TESTS = [f"tests/{file}.py::test_{number}" for file in FILES for number in range(3)]


class Node:
    """A process that runs tests, as a scheduler sees it."""

    def __init__(self, name: str) -> None:
        self.gateway = SimpleNamespace(id=name)
        self.shutting_down = False
        self.given: list[int] = []
        self.num_done = 0

    def send_runtest_some(self, indices: list[int]) -> None:
        self.given += indices

    def shutdown(self) -> None:
        self.shutting_down = True

    def run(self, scheduler: FromBothEnds) -> None:
        """NOTE: as xdist's process does, begins a test only when it knows the next, or that there is none."""
        while self.num_done + (not self.shutting_down) < len(self.given):
            self.num_done += 1
            scheduler.mark_test_complete(self, self.given[self.num_done - 1])


def report(node_id: str, when: Any, duration: float, longrepr: Any = None) -> TestReport:
    outcome: Any = "skipped" if longrepr else "passed"
    return TestReport(node_id, ("", 0, ""), {}, outcome, longrepr, when, duration=duration)


@pytest.fixture
def scheduler(pytestconfig: pytest.Config) -> FromBothEnds:
    config: Any = SimpleNamespace(
        option=SimpleNamespace(loadscopereorder=True, maxprocesses=None),
        getvalue=lambda name: {"tx": ["2*popen"]}[name],
        hook=pytestconfig.hook,
    )
    return FromBothEnds(config)


def start(scheduler: FromBothEnds, *nodes: Node) -> None:
    for node in nodes:
        scheduler.add_node(node)
        scheduler.add_node_collection(node, TESTS)
    scheduler.schedule()


@pytest.mark.parametrize("num_done", [0, 2, 4, 8, 11])
def test_a_process_that_dies_leaves_each_test_that_it_has_not_begun_to_another(
    scheduler: FromBothEnds, num_done: int
) -> None:
    dying, replacing = Node("gw0"), Node("gw1")
    scheduler.numnodes = 1
    start(scheduler, dying)
    for index in range(num_done):
        dying.num_done += 1
        scheduler.mark_test_complete(dying, dying.given[index])
    assert scheduler.remove_node(dying) == TESTS[dying.given[num_done]]
    start(scheduler, replacing)
    replacing.run(scheduler)
    assert sorted(dying.given[: num_done + 1] + replacing.given) == list(range(len(TESTS)))
    assert replacing.num_done == len(replacing.given)
    assert scheduler.tests_finished


def test_one_process_has_the_clusters_and_each_file_is_whole(scheduler: FromBothEnds) -> None:
    nodes = [Node("gw0"), Node("gw1")]
    start(scheduler, *nodes)
    while scheduler.workqueue:
        for node in nodes:
            node.num_done += 1
            scheduler.mark_test_complete(node, node.given[node.num_done - 1])
    first, second = ([TESTS[index].split("::")[0] for index in node.given[::3]] for node in nodes)
    assert first[:3] == ["tests/faults/test_c.py", "tests/e2e/test_b.py", "tests/unit/worker/test_h.py"]
    assert second[:4] == [f"tests/{file}.py" for file in ("unit/engine/test_g", *FILES[4:6], "golden/test_d")]
    assert sorted(nodes[0].given + nodes[1].given) == list(range(len(TESTS)))


def test_files_with_clusters_come_first() -> None:
    files = ["tests/contract/test_a.py", "tests/e2e/test_b.py", "tests/faults/test_z.py", "tests/unit/worker/test_c.py"]
    assert sorted(files, key=place) == [files[2], files[1], files[3], files[0]]


def test_times_are_added_by_room() -> None:
    reports = [
        report("tests/unit/engine/test_a.py::test_one", "setup", 1.0),
        report("tests/unit/engine/test_a.py::test_one", "call", 2.0),
        report("tests/golden/test_b.py::test_two[x/y::z]", "call", 4.5),
    ]
    for each, taken in zip(reports, (0.25, 1.25, 0.5), strict=True):
        setattr(each, PROCESSOR_S, taken)
    assert table_of(reports) == [
        "    4.5 s      0.5 processor-s      1 tests  tests/golden",
        "    3.0 s      1.5 processor-s      1 tests  tests/unit/engine",
    ]
    assert costliest_of(reports) == ["    1.5 processor-s  tests/unit/engine/test_a.py"]
    assert room_of("tests/unit/test_sentinel_url.py::test_one") == "tests/unit"


def test_processor_time_comes_with_reports_of_other_processes() -> None:
    sent = report("tests/golden/test_b.py::test_two", "call", 1.0)
    setattr(sent, PROCESSOR_S, 2.5)
    received = TestReport._from_json(sent._to_json())
    assert costliest_of([received]) == ["    2.5 processor-s  tests/golden/test_b.py"]


def test_processor_time_is_that_of_this_process_its_children_and_a_server() -> None:
    before_s = processor_s()
    subprocess.run([sys.executable, "-c", "while __import__('time').process_time() < 0.3: pass"], check=True)
    assert processor_s() - before_s >= 0.25, "a child that has ended; its time is told in hundredths"
    assert processor_s(os.getpid()) > 1.9 * processor_s(), "another process, here this one once more"


def test_skips_are_counted_by_reason() -> None:
    reasons = ["no GPU", "no GPU", "no spin"]
    reports = [report("tests/a.py::b", "setup", 0.0, ("a.py", 1, f"Skipped: {reason}")) for reason in reasons]
    assert reasons_of(reports) == ["    2 skipped: no GPU", "    1 skipped: no spin"]


def test_rows_of_the_fault_matrix_come_with_the_reports() -> None:
    row = Row("prefill", "COMPUTING", "kill -9", "exact", 1.5)
    ended = report("tests/faults/test_a.py::test_one", "teardown", 0.0)
    ended.user_properties.append(property_of(row))
    assert rows_of([report("tests/faults/test_a.py::test_one", "call", 1.0), ended]) == [row]
