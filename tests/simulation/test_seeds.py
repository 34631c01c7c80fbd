"""The real protocol under faults, one seed after another: whatever happens in a scenario, its invariants hold.

A seed that fails is replayed by `make simulate SEEDS=1 ARGS="--first SEED --shrink"`.
"""

import gc
import logging
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.simulation.fabric import Pipe
from tandem.simulation.fault import FaultKind
from tandem.simulation.fibers import Fiber
from tandem.simulation.node import Node
from tandem.simulation.run import run_scenario
from tandem.simulation.scenario import scenario_of
from tandem.simulation.world import World

ROOT = Path(__file__).parents[2]
QUICK = range(100)
MORE = range(100, 200)
MANY = [range(first, first + 100) for first in range(200, 1000, 100)]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Silences the processes' logs of the faults injected into them."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def run_all(seeds: range) -> Counter[str]:
    """Number of requests by ending; fails with every violation of the first seed that has one."""
    endings: Counter[str] = Counter()
    for seed in seeds:
        report = run_scenario(scenario_of(seed))
        assert not report.violations, f"seed {seed}: {report.violations}"
        endings.update(outcome.ending for outcome in report.outcomes)
    return endings


@pytest.mark.timeout(900)
def test_a_hundred_seeds() -> None:
    endings = run_all(QUICK)
    assert endings["whole"] > 1000, f"too few requests are served to prove anything: {endings}"
    assert endings["waits"] == 0
    assert {fault.kind for seed in QUICK for fault in scenario_of(seed).faults} == set(FaultKind)


@pytest.mark.timeout(900)
def test_a_hundred_more_seeds() -> None:
    """NOTE: a second test, so that two processes share the seeds. A stream's pings stood still in seed 105."""
    run_all(MORE)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seeds", MANY, ids=lambda seeds: str(seeds.start))
def test_many_seeds(seeds: range) -> None:
    run_all(seeds)


def test_a_seed_is_the_same_in_every_process() -> None:
    """In two processes that hash strings differently and have other addresses."""
    program = (
        "import logging; logging.disable(logging.CRITICAL);"
        "from tandem.simulation.seeds import run_seed;"
        "print(*(run_seed(seed).digest for seed in (2, 9)))"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for hash_seed in ("1", "2")
    ]
    digests = [process.communicate()[0].split() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert digests[0] == digests[1]
    assert len(set(digests[0])) == 2


def test_a_seed_is_the_same_whatever_number_its_process_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Statuses told the real number, so sizes of messages, and with them the digest, changed from run to run.

    NOTE: 1 is one byte in a message and exists, which the search for this thread's core needs.
    """
    first = run_scenario(scenario_of(2))
    monkeypatch.setattr(os, "getpid", lambda: 1)
    assert run_scenario(scenario_of(2)).digest == first.digest


def test_a_run_leaves_nothing_behind_for_the_next() -> None:
    """Nor does it matter whether it would end with its first violation."""
    first = run_scenario(scenario_of(3))
    run_scenario(scenario_of(4))
    assert run_scenario(scenario_of(3), ends_early=True).digest == first.digest


def test_a_run_leaves_nothing_in_memory() -> None:
    """Each left 3 MB: tasks that its coroutines began as they ended waited in the thread's own event loop."""
    run_scenario(scenario_of(300))
    gc.collect()
    assert not [found for found in gc.get_objects() if type(found) in (Pipe, Node, World)]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux to confine a thread to a core")
def test_a_run_keeps_to_one_core_and_the_process_to_all_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeds took nearly twice as long while each turn woke a thread on another core."""
    before, during = os.sched_getaffinity(0), set[frozenset[int]]()
    begin = Fiber._run

    def noting(fiber: Fiber) -> None:
        during.add(frozenset(os.sched_getaffinity(0)))
        begin(fiber)

    monkeypatch.setattr(Fiber, "_run", noting)
    run_scenario(scenario_of(5))
    (cores,) = during
    assert len(cores) == 1
    assert cores <= before
    assert os.sched_getaffinity(0) == before
