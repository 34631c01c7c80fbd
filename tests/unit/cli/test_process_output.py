"""Lines of processes on disks that are full and on terminals that are closed."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.cli.process_output import ProcessOutput

LINE = "x" * 99
Stop = list[str]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@contextlib.contextmanager
def output_to(directory: Path | None, terminal: Path) -> Iterator[tuple[ProcessOutput, Stop]]:
    """An output whose terminal is a file, and the list to which it adds a word when it asks the system to stop."""
    stopped: Stop = []
    with terminal.open("a") as stream, ProcessOutput(directory, stream) as output:
        output.on_closed(lambda: stopped.append("stop"))
        yield output, stopped


def fill(disk: Path) -> Path:
    """Take all space that is left."""
    filler = disk / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(512))
    return filler


def test_a_full_disk_costs_lines_and_each_is_counted(small_disk: Path, tmp_path: Path) -> None:
    """Regression: the first line that the disk did not take stopped the whole system."""
    log, terminal = small_disk / "logs" / "decode-0.log", tmp_path / "terminal"
    with output_to(small_disk / "logs", terminal) as (output, stopped):
        output.line("decode-0", "first")
        filler = fill(small_disk)
        for number in range(200):
            output.line("decode-0", f"{number} {LINE}")
        filler.unlink()
        output.line("decode-0", "again")
        output.line("decode-0", "and again")
    lines = log.read_text().splitlines()
    num_kept = sum(line.endswith(LINE) for line in lines)
    assert not stopped
    assert 0 < num_kept < 200, "what the test rests on: the disk took some lines and not others"
    assert lines[0] == "first"
    assert lines[-3:] == [f"({200 - num_kept} lines were dropped)", "again", "and again"]
    assert terminal.read_text().splitlines() == [
        f"tandem    | {log} cannot be written (No space left on device): lines are dropped until it can",
        f"tandem    | {log} is written again; {200 - num_kept} lines were dropped",
    ]


def test_an_outage_that_lasts_is_told_at_the_end(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "decode-0.log"
    log.parent.mkdir()
    log.symlink_to("/dev/full")
    with output_to(log.parent, tmp_path / "terminal") as (output, stopped):
        for _ in range(3):
            output.line("decode-0", LINE)
    assert not stopped
    assert (tmp_path / "terminal").read_text().endswith(f"{log} is closed; 3 lines were dropped\n")


def test_each_outage_is_told_once(small_disk: Path, tmp_path: Path) -> None:
    with output_to(small_disk / "logs", tmp_path / "terminal") as (output, _):
        for _ in range(2):
            filler = fill(small_disk)
            for _ in range(100):
                output.line("decode-0", LINE)
            filler.unlink()
            output.line("decode-0", "again")
    said = (tmp_path / "terminal").read_text()
    assert said.count("cannot be written (No space left on device)") == said.count("is written again; ") == 2


def test_a_log_that_cannot_be_made_is_tried_again(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "decode-0.log"
    with output_to(log.parent, tmp_path / "terminal") as (output, stopped):
        log.parent.rmdir()
        output.line("decode-0", "lost")
        log.parent.mkdir()
        output.line("decode-0", "kept")
    assert not stopped
    assert log.read_text() == "(1 line was dropped)\nkept\n"


def test_standard_error_on_a_full_disk_stops_nothing(small_disk: Path) -> None:
    """As in `tandem up 2>log`: later lines appear once there is room, after a line that says how many are missing."""
    terminal = small_disk / "log"
    with output_to(None, terminal) as (output, stopped):
        output.report("starts")
        filler = fill(small_disk)
        for _ in range(200):
            output.line("decode-0", LINE)
        filler.unlink()
        output.line("gateway", "goes on")
    lines = terminal.read_text().splitlines()
    num_kept = sum(line == f"decode-0  | {LINE}" for line in lines)
    assert not stopped
    assert lines[-2:] == [f"({200 - num_kept} lines were dropped)", "gateway   | goes on"]


def test_a_closed_pipe_stops_the_system() -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream, ProcessOutput(None, stream) as output:
        stopped: Stop = []
        output.on_closed(lambda: stopped.append("stop"))
        output.line("decode-0", "read")
        assert not stopped
        os.close(reading)
        output.line("decode-0", "read by nobody")
        assert stopped == ["stop"]


def test_a_terminal_that_hung_up_stops_the_system() -> None:
    """It answers EIO, as a damaged disk does."""
    stopped: Stop = []
    controller, terminal = os.openpty()
    with os.fdopen(terminal, "w") as stream, ProcessOutput(None, stream) as output:
        output.on_closed(lambda: stopped.append("stop"))
        os.close(controller)
        output.line("decode-0", "seen by nobody")
    assert stopped == ["stop"]


def test_a_closed_stream_stops_the_system(tmp_path: Path) -> None:
    stopped: Stop = []
    with (tmp_path / "terminal").open("w") as stream:
        pass
    with ProcessOutput(None, stream) as output:
        output.on_closed(lambda: stopped.append("stop"))
        output.report("to nobody")
    assert stopped == ["stop"]


def test_nothing_stays_open(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    with output_to(tmp_path / "logs", tmp_path / "terminal") as (output, _):
        for name in ("gateway", "decode-0"):
            output.line(name, "x")
        output.report("y")
    assert os.listdir("/proc/self/fd") == before
