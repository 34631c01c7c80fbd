"""Workers lend each other cores: what a board says, and that helpers run there exactly while the lender is idle."""

import os
from pathlib import Path

import pytest

from tandem.compute.native.bindings import NativeKernels
from tandem.compute.native.core_board import CoreBoard, MissingBoardError
from tandem.core.errors import ConfigurationError
from tandem.process.cores import Share
from tests.unit.compute.native.test_pool import kernels, needs_proc, run

__all__ = ["kernels"]

BOARD = """
from pathlib import Path
from tandem.compute.native.core_board import CoreBoard
from tandem.process.cores import Share

def run_ns():
    return {t: int(open(f"/proc/self/task/{t}/schedstat").read().split()[0]) for t in os.listdir("/proc/self/task")}

def borrow(*lenders):
    known = set(os.listdir("/proc/self/task"))
    CoreBoard.create(Path(sys.argv[1]), [Share(1), *lenders])
    boards = [CoreBoard(Path(sys.argv[1]), slot) for slot in range(1 + len(lenders))]
    boards[0].borrow()
    return boards[1:], set(os.listdir("/proc/self/task")) - known

def until(condition, deadline_s=30.0):
    end_s = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end_s
        assert torch.equal(kernels.linear(x, weight), alone)

torch.set_num_threads(1)
"""


def run_with_board(script: str, tmp_path: Path) -> None:
    run(f"import sys; sys.argv[1:] = [{str(tmp_path / 'board')!r}]\n{BOARD}{script}")


def test_everybody_reads_what_each_says(tmp_path: Path) -> None:
    CoreBoard.create(tmp_path / "board", [Share(2, (0, 1)), Share(3), Share(1, tuple(range(40)))])
    first, last = CoreBoard(tmp_path / "board", 0), CoreBoard(tmp_path / "board", 2)
    assert [first.is_busy(slot) for slot in range(3)] == [False, True, False], "who never came is busy"
    last.set_busy(True)
    assert [first.is_busy(slot) for slot in range(3)] == [False, True, True]
    last.set_busy(False)
    assert not first.is_busy(2)


@pytest.mark.parametrize(
    ("content", "slot"), [(None, 0), (b"", 0), (b"short", 0), (bytes(64), 1), (bytes(64), -1), (bytes(65), 0)]
)
def test_a_file_that_is_no_board_is_refused_by_name(tmp_path: Path, content: bytes | None, slot: int) -> None:
    path = tmp_path / "board"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=str(path)) as raised:
        CoreBoard(path, slot)
    assert isinstance(raised.value, MissingBoardError) == (content is None)


@needs_proc
def test_helpers_run_while_the_lender_is_idle_and_never_else(kernels: NativeKernels, tmp_path: Path) -> None:
    run_with_board(
        """
(lender,), helpers = borrow(Share(2))
assert len(helpers) == 2
started = run_ns()
until(lambda: all(run_ns()[t] > started[t] + 1_000_000 for t in helpers))
lender.set_busy(True)
until(lambda: all(is_asleep(t) for t in helpers))
before_calls = run_ns()
for _ in range(200):
    assert torch.equal(kernels.linear(x, weight), alone)
assert all(run_ns()[t] == before_calls[t] for t in helpers)
lender.set_busy(False)
until(lambda: all(run_ns()[t] > before_calls[t] + 1_000_000 for t in helpers))
""",
        tmp_path,
    )


@needs_proc
def test_of_several_lenders_only_the_idle_one_is_called(kernels: NativeKernels, tmp_path: Path) -> None:
    run_with_board(
        """
(idle, busy), helpers = borrow(Share(1), Share(1))
busy.set_busy(True)
assert others_fall_asleep()
before_calls = run_ns()
until(lambda: any(run_ns()[t] > before_calls[t] + 1_000_000 for t in helpers))
assert sum(run_ns()[t] == before_calls[t] for t in helpers) == 1
""",
        tmp_path,
    )


@needs_proc
def test_helpers_keep_to_the_lenders_cores(kernels: NativeKernels, tmp_path: Path) -> None:
    core = min(os.sched_getaffinity(0))
    run_with_board(
        f"""
(lender,), helpers = borrow(Share(1, ({core},)))
assert [os.sched_getaffinity(int(t)) for t in helpers] == [{{{core}}}]
""",
        tmp_path,
    )


@needs_proc
def test_own_and_borrowed_threads_compute_together(kernels: NativeKernels, tmp_path: Path) -> None:
    run_with_board(
        """
torch.set_num_threads(2)
(lender,), helpers = borrow(Share(2))
for i in range(300):
    lender.set_busy(i % 3 == 0)
    assert torch.equal(kernels.linear(x, weight), alone)
""",
        tmp_path,
    )


@needs_proc
def test_borrowed_time_is_what_the_helpers_worked(kernels: NativeKernels, tmp_path: Path) -> None:
    run_with_board(
        """
CoreBoard.create(Path(sys.argv[1]), [Share(2), Share(1)])
board, lender = (CoreBoard(Path(sys.argv[1]), slot) for slot in range(2))
assert board.borrowed_s() == 0.0
known = set(os.listdir("/proc/self/task"))
board.borrow()
(helper,) = set(os.listdir("/proc/self/task")) - known
assert board.borrowed_s() == 0.0
start_s = time.monotonic()
until(lambda: board.borrowed_s() > 0.01)
lender.set_busy(True)
until(lambda: is_asleep(helper))
assert 2 * board.borrowed_s() <= time.monotonic() - start_s, "one helper is worth half of what two own threads are"
worked_s = board.borrowed_s()
for _ in range(200):
    assert torch.equal(kernels.linear(x, weight), alone)
assert board.borrowed_s() == worked_s
""",
        tmp_path,
    )
