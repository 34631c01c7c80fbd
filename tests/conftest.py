"""Shared settings: small tensors are fastest on one thread; without a GPU, Triton interprets its kernels."""

import gc
import os
from collections.abc import Generator
from typing import Any

import pytest
import torch
from hypothesis import settings

from tests.faults import matrix
from tests.helpers import fork_server, rooms
from tests.helpers.side_by_side import FromBothEnds

# NOTE: an example's time is not what is tested, and any may take long where other processes want the cores
settings.register_profile("tandem", deadline=None)
settings.load_profile("tandem")
torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # NOTE: read when triton is first imported, by whichever test module


_SPENT_S = pytest.StashKey[float]()


def pytest_sessionstart() -> None:
    """Disables garbage collection while tests are collected, whose objects stay to the end anyway."""
    gc.disable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Collected tests and their imports are near a million objects: looking through them stops this process for one or
    two seconds, in which what is tested goes on. They stay to the end anyway.
    """
    _rest_collector()
    gc.enable()
    session.config.stash[_SPENT_S] = rooms.processor_s(fork_server.SERVER.pid)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, None, None]:
    """Reports of its tests, and whatever else a module leaves, stay to the end too."""
    yield
    if nextitem is None or nextitem.path != item.path:
        _rest_collector()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """With the processor time since the report before it."""
    report = yield
    now_s = rooms.processor_s(fork_server.SERVER.pid)
    setattr(report, rooms.PROCESSOR_S, now_s - item.config.stash[_SPENT_S])
    item.config.stash[_SPENT_S] = now_s
    return report


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FromBothEnds:
    """With `-n`."""
    return FromBothEnds(config, log)


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line a reason, a costly file and a room, then what failed and the result: the last screen."""
    stats = terminalreporter.stats
    reports = [each for kind in stats.values() for each in kind if isinstance(each, pytest.TestReport)]
    if not reports:
        return
    if rows := matrix.rows_of(reports):
        matrix.tell(rows, terminalreporter)
    terminalreporter.section("seconds of each room")
    lines = [*rooms.reasons_of(stats.get("skipped", [])), *rooms.costliest_of(reports), *rooms.table_of(reports)]
    terminalreporter.write("\n".join(lines) + "\n")


def _rest_collector() -> None:
    gc.collect()
    gc.freeze()
