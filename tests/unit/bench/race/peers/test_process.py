"""Started processes are awaited, and nothing of them is left, however they behave."""

import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from bench.race.peers.process import Program, ports, running, surroundings
from bench.race.system import NotHere

STAND_IN = Path(__file__).parent / "stand_in.py"
Make = Callable[..., Program]


@pytest.fixture
def program(tmp_path: Path) -> Make:
    def make(*words: str, name: str = "peer", limit_s: float = 30.0, **environment: str) -> Program:
        (port,) = ports(1)
        return Program(
            name,
            [sys.executable, str(STAND_IN), str(port), *words],
            tmp_path / "logs" / f"{name}.log",
            f"http://127.0.0.1:{port}/",
            environment,
            ready_limit_s=limit_s,
            grace_s=0.5,
        )

    return make


def runs(process: psutil.Process) -> bool:
    """NOTE: an orphan that has ended is a zombie until the system's first process looks."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def family(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


@pytest.mark.parametrize("words", [(), ("deaf",), ("child",), ("deaf", "child", "stray")])
def test_nothing_is_left(program: Make, words: tuple[str, ...]) -> None:
    with running(program(*words)) as (pid,):
        members = family(pid)
        assert len(members) == 1 + len({"child", "stray"} & set(words))
    assert not [member for member in members if runs(member)]


def test_nothing_is_left_after_an_exception(program: Make) -> None:
    members: list[psutil.Process] = []

    def fail() -> None:
        with running(program("deaf", "child")) as (pid,):
            members.extend(family(pid))
            raise RuntimeError("the client failed")

    with pytest.raises(RuntimeError, match="the client failed"):
        fail()
    assert len(members) == 2
    assert not [member for member in members if runs(member)]


def test_what_a_dead_server_had_started_is_ended(program: Make) -> None:
    """A leader that ends by itself leaves members of its group to nobody."""
    with running(program("child")) as (pid,):
        leader, child = family(pid)
        leader.kill()
    assert not runs(child)


def test_a_server_that_ends_is_not_here(program: Make) -> None:
    with pytest.raises(NotHere, match="peer ended with status 1; its output ends: no such checkpoint"):
        running(program("dies")).__enter__()


def test_a_server_that_is_never_ready_is_not_here_and_is_ended(program: Make) -> None:
    began_s = time.time()
    with pytest.raises(NotHere, match="peer was not ready after 5 s; its output ends: loading"):
        running(program("mute", limit_s=5)).__enter__()
    assert not [
        process
        for process in psutil.Process().children(recursive=True)
        if process.create_time() >= began_s and runs(process)
    ]


def test_one_that_fails_ends_the_others(program: Make) -> None:
    others = program("deaf")
    with pytest.raises(NotHere, match="second ended"):
        running(others, program("dies", name="second")).__enter__()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(others.ready_url)


def test_a_command_that_is_not_there_is_not_here(tmp_path: Path) -> None:
    missing = Program("peer", [str(tmp_path / "vllm")], tmp_path / "peer.log", "http://127.0.0.1:1/")
    with pytest.raises(NotHere, match="peer cannot be started"):
        running(missing).__enter__()


def test_settings_of_the_client_do_not_reach_it(program: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    plain, told = program(), program(name="told", OMP_NUM_THREADS="2")
    with running(plain, told):
        assert [urllib.request.urlopen(one.ready_url).read() for one in (plain, told)] == [b"none", b"2"]


def test_it_is_kept_off_the_network() -> None:
    assert surroundings({})["HF_HUB_OFFLINE"] == "1"
    assert "PATH" in surroundings({})
