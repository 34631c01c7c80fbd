"""The kernels' threads: started when wanted, shared by all callers, asleep when idle, absent after a fork.

What concerns the whole process runs in one of its own, on tensors large enough that every call wants helpers.
"""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tandem.compute.native.bindings import NativeKernels
from tests.helpers.native_kernels import load_or_skip

PREAMBLE = """
import os, sys, time, torch
from tandem.compute.native.bindings import load

def num_threads():
    return len(os.listdir("/proc/self/task"))

def is_asleep(thread):
    with open(f"/proc/self/task/{thread}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] == "S"

def others_fall_asleep(deadline_s=20.0):
    end_s = time.monotonic() + deadline_s
    while time.monotonic() < end_s:
        if all(is_asleep(thread) for thread in os.listdir("/proc/self/task") if int(thread) != os.getpid()):
            return True
    return False

kernels = load()
x, weight = torch.randn(8, 1024), torch.randn(2000, 1024)
torch.set_num_threads(1)
alone = kernels.linear(x, weight)
before = num_threads()
torch.set_num_threads(3)
assert torch.equal(kernels.linear(x, weight), alone)
assert num_threads() == before + 2
"""


@pytest.fixture(scope="module")
def kernels() -> NativeKernels:
    return load_or_skip()


def run(script: str) -> None:
    """`script` after the preamble, in a process that must end by itself and well."""
    code = PREAMBLE + script
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


needs_proc = pytest.mark.skipif(
    not os.path.exists("/proc/self/task"), reason="threads are counted in /proc/self/task, which is not here"
)


@needs_proc
def test_idle_helpers_sleep(kernels: NativeKernels) -> None:
    run("assert others_fall_asleep()\nassert torch.equal(kernels.linear(x, weight), alone)")


@needs_proc
def test_helpers_are_kept_and_only_added_to(kernels: NativeKernels) -> None:
    run("""
for threads in (2, 3, 1, 3, 5, 2):
    torch.set_num_threads(threads)
    assert torch.equal(kernels.linear(x, weight), alone)
assert num_threads() == before + 4
""")


@needs_proc
def test_a_forked_child_starts_helpers_of_its_own(kernels: NativeKernels) -> None:
    run("""
if child := os.fork():
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(kernels.linear(x, weight), alone)
else:
    assert num_threads() == 1
    assert torch.equal(kernels.linear(x, weight), alone)
    assert num_threads() == 3
    assert others_fall_asleep()
""")


@needs_proc
def test_a_child_forked_during_a_call_computes(kernels: NativeKernels) -> None:
    """The pool was busy at the fork, and nobody in the child will ever release it."""
    run("""
import threading
stop = threading.Event()

def call_until_stopped():
    while not stop.is_set():
        kernels.linear(x, weight)

caller = threading.Thread(target=call_until_stopped)
caller.start()
for _ in range(20):
    if child := os.fork():
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    else:
        started = num_threads()
        good = torch.equal(kernels.linear(x, weight), alone)
        os._exit(not (good and num_threads() == started + 2))
stop.set()
caller.join()
""")


@needs_proc
def test_helpers_keep_off_the_callers_core(kernels: NativeKernels) -> None:
    """Wherever the caller is moved to; in a child, whose pool has no more helpers than there are other cores."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("a helper needs a core beside the caller's, and this process has one")
    run("""
cores = os.sched_getaffinity(0)
if child := os.fork():
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
else:
    torch.set_num_threads(2)
    kernels.linear(x, weight)
    (helper,) = (int(thread) for thread in os.listdir("/proc/self/task") if int(thread) != os.getpid())
    for core in sorted(cores)[:2] * 2:
        end_s = time.monotonic() + 20.0
        while os.sched_getaffinity(helper) != cores - {core}:
            assert time.monotonic() < end_s, (os.sched_getaffinity(helper), core)
            os.sched_setaffinity(0, {core})
            os.sched_setaffinity(0, cores)
            assert torch.equal(kernels.linear(x, weight), alone)
    assert os.sched_getaffinity(0) == cores
""")


def test_callers_at_the_same_time_get_the_same_results(kernels: NativeKernels) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(700, 512, generator=generator).bfloat16()
    inputs = [torch.randn(rows, 512, generator=generator).bfloat16() for rows in (1, 7, 40, 90)]
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    expected = [kernels.linear(x, weight) for x in inputs]

    def all_equal(threads: int) -> bool:
        torch.set_num_threads(threads)
        return all(
            torch.equal(kernels.linear(x, weight), right)
            for _ in range(50)
            for x, right in zip(inputs, expected, strict=True)
        )

    try:
        with ThreadPoolExecutor(4) as callers:
            assert all(callers.map(all_equal, (2, 3, 4, 5)))
    finally:
        torch.set_num_threads(before)
