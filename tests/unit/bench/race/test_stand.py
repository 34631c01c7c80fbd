"""Real processes side by side, of which one runs."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from bench.race import stand as module
from bench.race.stand import Stand
from bench.race.system import Served
from tandem.core.errors import UnavailableError

PROGRAM = "import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', 'input()']).returncode)"


@dataclass
class Pair:
    """A system of two processes. `readiness`: what it says of itself, look by look."""

    name: str
    readiness: list[bool] = field(default_factory=list)
    pids: list[int] = field(default_factory=list)
    ended_well: bool = False

    def prepare(self) -> None:
        pass

    @contextmanager
    def serve(self, checkpoint: Path) -> Iterator[Served]:
        with subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE) as process:
            parent = psutil.Process(process.pid)
            while not parent.children():
                pass
            self.pids = [process.pid, parent.children()[0].pid]
            yield Served("", "", (process.pid,), is_ready=lambda: not self.readiness or self.readiness.pop(0))
            assert process.stdin is not None
            process.stdin.close()
            self.ended_well = process.wait(20) == 1  # the child's end of file

    def body(self, prompt: Sequence[int], num_output: int) -> dict[str, object]:
        return {}

    def is_stopped(self) -> bool:
        (found,) = {psutil.Process(pid).status() == psutil.STATUS_STOPPED for pid in self.pids}
        return found


def stand_of(*systems: Pair, slept: list[float] | None = None) -> Stand:
    found = Stand(Path("unused"), sleep=(slept if slept is not None else []).append)
    for system in systems:
        found.start(system)
    return found


def test_one_runs_and_the_others_are_stopped() -> None:
    one, other = Pair("one"), Pair("other")
    with stand_of(one, other) as stand:
        assert one.is_stopped()
        assert other.is_stopped()
        with stand.running(other) as served:
            assert served.pids == (other.pids[0],)
            assert one.is_stopped()
            assert not other.is_stopped()
        assert other.is_stopped()
    assert one.ended_well
    assert other.ended_well


def test_one_can_be_ended_and_started_anew_beside_others() -> None:
    one, other = Pair("one"), Pair("other")
    with stand_of(one, other) as stand:
        stand.end("one")
        assert one.ended_well
        assert other.is_stopped()
        one.ended_well = False
        stand.start(one)
        assert one.is_stopped()
    assert one.ended_well


def test_what_fails_in_the_middle_leaves_nobody_behind() -> None:
    one, other = Pair("one"), Pair("other")
    with pytest.raises(RuntimeError, match="no luck"), stand_of(one, other) as stand, stand.running(one):
        raise RuntimeError("no luck")
    assert not any(psutil.pid_exists(pid) for pid in (*one.pids, *other.pids))


def test_one_that_was_stopped_is_awaited() -> None:
    slept: list[float] = []
    one = Pair("one", readiness=[False, False, True])
    with stand_of(one, slept=slept) as stand, stand.running(one):
        assert one.readiness == []
        assert len(slept) == 2


def test_one_that_never_gets_ready_is_not_awaited_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WAKE_S", 0.0)
    one = Pair("one", readiness=[False] * 100_000)
    with stand_of(one) as stand:
        with pytest.raises(UnavailableError, match="one is not ready"), stand.running(one):
            raise AssertionError("it is")
        assert one.is_stopped()


def test_a_long_stop_is_followed_by_a_while_in_which_it_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    one = Pair("one")
    with stand_of(one, slept=slept) as stand:
        with stand.running(one):
            assert slept == []
        monkeypatch.setattr(module, "SETTLE_S", 0.0)
        with stand.running(one):
            assert slept == [0.0]
