"""Costs of trees of real processes."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from bench.race import processes
from bench.race.processes import ProcessTrees

MB = 1_000_000
# It answers each line: "hold N" takes N MB of its own, "drop" gives them back, "burn" uses a tenth of a second.
CHILD = """
import sys, time
held = None
for line in sys.stdin:
    word, *rest = line.split()
    if word == "hold":
        held = b"x" * (int(rest[0]) * 1_000_000)
    elif word == "drop":
        held = None
    else:
        while time.process_time() < float(rest[0]):
            pass
    print("done", flush=True)
"""
PARENT = f"import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', {CHILD!r}]).returncode)"

# What a program goes on with that has forked: the parent answers lines, then ends the child, which waits.
ANSWERING = """
for line in sys.stdin if child else []:
    print("done", flush=True)
if child:
    os.kill(child, 9)
    os.wait()
else:
    import signal
    signal.pause()
"""


class Told:
    """A running program that does as it is told."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self.trees = ProcessTrees([process.pid])

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"


@contextmanager
def running(program: str) -> Iterator[Told]:
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield Told(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(20)


def test_processor_time_of_grandchildren_counts() -> None:
    with running(PARENT) as told:
        told.tell("burn 0.05")
        before_s = told.trees.cpu_s()
        told.tell("burn 0.35")
        assert 0.2 <= told.trees.cpu_s() - before_s <= 0.5
        assert len(told.trees.pids()) == 2


def test_memory_that_was_given_back_still_counts_as_the_peak() -> None:
    with running(PARENT) as told:
        told.tell("burn 0")
        before = told.trees.peak_bytes()
        told.tell("hold 80")
        told.tell("drop")
        assert 75 * MB <= told.trees.peak_bytes() - before <= 90 * MB


def test_a_peak_can_be_forgotten() -> None:
    with running(CHILD) as told:
        told.tell("hold 80")
        told.tell("drop")
        told.trees.forget_peaks()
        before = told.trees.peak_bytes()
        told.tell("hold 30")
        assert 25 * MB <= told.trees.peak_bytes() - before <= 40 * MB


def test_pages_that_two_processes_share_count_once() -> None:
    """A fork shares everything until one of the two writes."""
    program = """
import os, sys
held = b"x" * 80_000_000
child = os.fork()
"""
    with running(program + ANSWERING) as told:
        told.tell("any")
        resident = sum(psutil.Process(pid).memory_info().rss for pid in told.trees.pids())
        assert len(told.trees.pids()) == 2
        assert resident > 160 * MB
        assert told.trees.peak_bytes() < 110 * MB


def test_a_file_counts_once_for_a_tree_and_whole_whoever_else_maps_it(tmp_path: Path) -> None:
    """As two systems that map the same weights."""
    file = tmp_path / "weights"
    file.write_bytes(b"x" * 40_000_000)
    program = f"""
import mmap, os, sys
child = os.fork()
with open({str(file)!r}, "rb") as file:
    held = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
assert held.find(b"y") == -1
"""
    with running(CHILD) as bare, running(program + ANSWERING) as one, running(program + ANSWERING) as other:
        for told in (one, other):
            told.tell("any")
        bare.tell("burn 0")
        bare_bytes = bare.trees.peak_bytes()
        for told in (one, other):
            assert len(told.trees.pids()) == 2
            (child,) = psutil.Process(told.process.pid).children()
            while not any(mapped.path == str(file) and mapped.rss > 39 * MB for mapped in child.memory_maps()):
                pass
            assert 38 * MB <= told.trees.peak_bytes() - bare_bytes <= 60 * MB


def test_trees_can_be_stopped_and_go_on() -> None:
    with running(PARENT) as told:
        told.tell("burn 0")
        told.trees.stop()
        assert {psutil.Process(pid).status() for pid in told.trees.pids()} == {psutil.STATUS_STOPPED}
        told.trees.go_on()
        told.tell("burn 0")


def test_a_child_that_is_stopped_before_it_runs_its_program_does_not_hold_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A parent cannot be stopped between vfork and exec, and its stopped child would never come to exec."""
    monkeypatch.setattr(processes, "_STUCK_S", 0.05)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    vforking = (
        "import os, sys; actions = [(os.POSIX_SPAWN_OPEN, 0, sys.argv[1], os.O_RDONLY, 0)]; "
        "os.waitpid(os.posix_spawn('/bin/cat', ['cat'], {}, file_actions=actions), 0)"
    )
    with subprocess.Popen([sys.executable, "-c", vforking, str(pipe)]) as process:
        trees = ProcessTrees([process.pid])
        parent = psutil.Process(process.pid)
        while not parent.children():
            pass
        child = parent.children()[0]
        stopping = threading.Thread(target=trees.stop)
        stopping.start()
        while child.status() != psutil.STATUS_STOPPED:
            pass
        with pipe.open("w"):  # NOTE: the child waits for a writer before it runs its program
            stopping.join(10)
            assert not stopping.is_alive()
            assert {psutil.Process(pid).status() for pid in trees.pids()} == {psutil.STATUS_STOPPED}
            trees.go_on()


def test_a_process_that_is_gone_costs_nothing() -> None:
    with running(CHILD) as told:
        trees = told.trees
    assert trees.pids() == []
    assert trees.cpu_s() == trees.peak_bytes() == 0
    trees.forget_peaks()
    trees.prioritise()


def test_only_those_below_the_roots_count() -> None:
    with running(CHILD) as told:
        told.tell("burn 0")
        assert os.getpid() not in told.trees.pids()
        assert told.trees.pids() == [told.process.pid]
