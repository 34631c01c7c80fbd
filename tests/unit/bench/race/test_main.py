"""The command: what it chooses, and a whole race over the bundled model."""

import argparse
import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from bench.race.__main__ import main, settings_of
from bench.race.runs import Runs
from bench.race.workloads import WORKLOADS
from tests.helpers import command_line
from tests.unit.bench.race import runs_by_hand

ROOT = Path(__file__).parents[4]
END_S = 280.0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--only", "tandem,nobody"], "--only='nobody' is not there; there are tandem, tandem-1p1d"),
        (["--only", "tandem-drafts"], "--only='tandem-drafts' is not there; there are tandem, tandem-1p1d"),
        (["--only", "tandem", "--workloads", "singel"], "--workloads='singel' is not there; there are single"),
        (["--only", "tandem", "--cpus", "first"], "cpus="),
        (["--only", "tandem", "--at-once", "-1"], "--at-once=-1 is less than 1"),
        (["--only", "tandem", "--shape", "big"], "--shape='big' is not there; there are qwen3-0.6b"),
    ],
)
def test_what_does_not_exist_is_refused_before_anything_runs(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--directory", str(tmp_path)]) == 2
    assert words in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_report_tells_what_there_is_and_starts_nothing(tmp_path: Path) -> None:
    """Also of shapes with fewer rounds than asked for. What was measured with other settings is not told."""
    workload = next(one for one in WORKLOADS if one.key == "batch")
    left = runs_by_hand.run("tandem", "batch", shape="demo", output_rate=123.0)
    cpus = sorted(os.sched_getaffinity(0))[:1]
    runs = Runs(tmp_path / "runs", {"tandem": {"flags": ["--max-running", "4"], "cpus": cpus}})
    runs.keep(replace(left, definition=runs.definition(left.slot, workload)))
    arguments = ["--only", "tandem,tandem-1p1d", "--shape", "demo", "--report", "--directory", str(tmp_path)]
    arguments += ["--cpus", str(cpus[0])]
    other = _race(arguments)
    assert other.returncode == 1, other.stderr
    assert "| 123 |" not in other.stdout
    arguments.append("--tandem-flags=--max-running 4")
    told = _race(arguments)
    assert told.returncode == 0, told.stderr
    assert "| 123 |" in told.stdout
    assert "starting" not in told.stdout
    assert "not allowed with" in _race([*arguments, "--fresh"]).stderr
    assert len(list((tmp_path / "runs").rglob("*.json"))) == 1


def test_settings_are_those_that_a_system_is_run_with() -> None:
    options = argparse.Namespace(tandem_flags="--max-running 4", peers_dtype="float32", speculate="auto")
    assert settings_of("tandem-1p1d", options, (0, 1)) == {"flags": ["--max-running", "4"], "cpus": [0, 1]}
    drafting = {"flags": ["--max-running", "4"], "speculate": "auto", "cpus": [0]}
    assert settings_of("tandem-drafts", options, (0,)) == drafting
    assert settings_of("vllm", options, (2,)) == {"dtype": "float32", "cpus": [2]}
    options.peers_dtype = ""
    assert settings_of("vllm", options, (2,)) == {"dtype": "fastest", "cpus": [2]}


@pytest.mark.slow
def test_a_whole_race_over_the_bundled_model(tmp_path: Path) -> None:
    """Both ways to run Tandem, every kind of workload but the longest; then again, from what was kept."""
    arguments = ["--only", "tandem,tandem-1p1d", "--shape", "demo", "--rounds", "1", "--floor-repeats", "1"]
    arguments += ["--workloads", "single,prefill-8,burst,turns", "--directory", str(tmp_path)]
    first = _race(arguments)
    assert "FAILED" not in first.stdout, first.stdout
    assert first.returncode == 0, first.stderr
    runs = [json.loads(path.read_text()) for path in (tmp_path / "runs").rglob("*.json")]
    assert len(runs) == 8
    for run in runs:
        assert run["measured"]["figures"]["CPU time"] > 0
        assert run["measured"]["figures"]["peak memory"] > 50
    cached = {(run["slot"]["system"], run["slot"]["workload"]): run["measured"]["cached_share"] for run in runs}
    assert cached["tandem", "prefill-8"] == 0.0
    assert cached["tandem", "turns"] > 0.5
    assert "1P1D / tandem" in (tmp_path / "race.md").read_text()
    assert {path.name for path in tmp_path.glob("*.svg")} == {"race-burst.svg"}  # NOTE: no peer, no ratios to draw
    again = _race(arguments)
    assert again.returncode == 0
    assert "starting" not in again.stdout


def _race(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    return command_line.run(*arguments, module="bench.race", env=os.environ, timeout_s=END_S)
