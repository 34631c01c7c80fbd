"""Environments: what makes them, when they are made anew, and what is said when they cannot be made."""

import dataclasses
import subprocess
from pathlib import Path

import pytest

from bench.race.peers.environment import Environment, commands, prepare, run
from bench.race.system import NotHere


def test_commands_install_then_repair() -> None:
    asked = Environment("peer", ("a==1",), bare=("b==2",), unwanted=("c",), only_binary=True, build=Path("/b"))
    made, installed, bare, removed = commands(asked, Path("/c.txt"))
    pip = ["/b/venvs/peer/bin/python", "-m", "pip"]
    assert made[1:] == ["-m", "venv", "/b/venvs/peer"]
    assert installed == [*pip, "install", "-c", "/c.txt", "--only-binary", ":all:", "a==1"]
    assert bare == [*pip, "install", "--no-deps", "b==2"]
    assert removed == [*pip, "uninstall", "-y", "c"]


def test_only_what_is_asked_for_is_done() -> None:
    assert len(commands(Environment("peer", ("a==1",)), Path("c.txt"))) == 2


def test_one_that_is_there_is_left_alone(tmp_path: Path) -> None:
    asked = Environment("peer", ("no-such-package==1",), build=tmp_path)
    asked.python.parent.mkdir(parents=True)
    asked.python.touch()
    (asked.directory / "race.json").write_text(asked.stamp)
    prepare(asked)
    assert asked.python.exists()


@pytest.mark.parametrize(
    "change", [{"packages": ("a==2",)}, {"bare": ("b",)}, {"aliases": {"a": "1"}}, {"constraints": ()}]
)
def test_the_stamp_tells_what_it_holds(change: dict[str, object]) -> None:
    asked = Environment("peer", ("a==1",))
    assert dataclasses.replace(asked, **change).stamp != asked.stamp  # type: ignore[arg-type]
    assert dataclasses.replace(asked, build=Path("/elsewhere")).stamp == asked.stamp


def test_a_failure_says_how_it_ended(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "peer.log"
    with pytest.raises(NotHere, match=r"it failed \(status 3\); its output ends: collecting\nno such version"):
        run(["sh", "-c", "echo collecting; echo no such version; exit 3"], "it failed", log)
    assert log.read_text() == "collecting\nno such version\n"


@pytest.mark.slow
def test_a_real_one(tmp_path: Path) -> None:
    """Made, with an alias that its interpreter finds; a failed one is made anew instead of being taken for whole."""
    asked = Environment("peer", ("pip",), constraints=(), aliases={"vllm": "0.32.0+cpu"}, build=tmp_path)
    asked.directory.mkdir(parents=True)
    (asked.directory / "left-over").touch()
    prepare(asked)
    code = "import importlib.metadata; print(importlib.metadata.version('vllm'))"
    found = subprocess.run([str(asked.python), "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "0.32.0+cpu\n"
    assert not (asked.directory / "left-over").exists()
