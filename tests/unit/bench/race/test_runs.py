"""Runs of a race that are kept between two starts."""

from dataclasses import replace
from pathlib import Path

import pytest

from bench.race.runs import Run, Runs, Slot, definition_of
from bench.race.workloads import WORKLOADS, Batch, Workload
from tests.unit.bench.race.runs_by_hand import measured

BATCH = Batch("batch", "batch", 6, 3, 5, 4)
SLOT = Slot("small", "batch", "vllm", 1)


def kept(runs: Runs, workload: Workload = BATCH, failure: str = "") -> Run:
    found = None if failure else measured({"output rate": 3.5}, {"output rate": 9.0})
    run = Run(SLOT, definition_of(workload), found, failure, "abc", "2026-01-02T03:04:05+00:00")
    runs.keep(run)
    return run


def test_what_was_kept_is_found_as_it_was(tmp_path: Path) -> None:
    run = kept(Runs(tmp_path))
    assert Runs(tmp_path).find(SLOT, BATCH) == run
    assert Runs(tmp_path).has(SLOT, BATCH)


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.key)
def test_every_workload_of_the_race_is_known_again(tmp_path: Path, workload: Workload) -> None:
    kept(Runs(tmp_path), workload)
    assert Runs(tmp_path).has(SLOT, workload)


def test_another_place_is_empty(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    kept(runs)
    for slot in (
        replace(SLOT, shape="qwen3-0.6b"),
        replace(SLOT, workload="turns"),
        replace(SLOT, system="vllm-1p1d"),
        replace(SLOT, turn=2),
    ):
        assert runs.find(slot, BATCH) is None


def test_a_workload_that_has_changed_is_measured_again(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    kept(runs)
    assert not runs.has(SLOT, replace(BATCH, output=5))
    assert runs.has(SLOT, replace(BATCH, title="another name"))


def test_a_run_with_other_settings_or_none_is_another_one(tmp_path: Path) -> None:
    now = Runs(tmp_path, {"vllm": {"dtype": "float32", "cpus": [0, 1]}})
    kept(Runs(tmp_path))
    assert not now.has(SLOT, BATCH)
    now.keep(replace(kept(Runs(tmp_path)), definition=now.definition(SLOT, BATCH)))
    assert now.has(SLOT, BATCH)
    for settings in ({"dtype": "bfloat16", "cpus": [0, 1]}, {"dtype": "float32", "cpus": [2, 3]}, {}):
        assert not Runs(tmp_path, {"vllm": settings}).has(SLOT, BATCH)


def test_a_failure_is_told_but_does_not_count(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    run = kept(runs, failure="it died")
    assert not runs.has(SLOT, BATCH)
    assert list(runs.of([SLOT, replace(SLOT, turn=2)], {"batch": BATCH})) == [run]


def test_a_later_success_replaces_a_failure(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    kept(runs, failure="it died")
    kept(runs)
    assert runs.has(SLOT, BATCH)


def test_half_a_file_is_never_read(tmp_path: Path) -> None:
    """A race killed while it wrote: only a whole file takes the place of a run."""
    runs = Runs(tmp_path)
    kept(runs)
    (path,) = tmp_path.rglob("*.json")
    path.rename(path.with_suffix(".partial"))
    assert not runs.has(SLOT, BATCH)


def test_all_can_be_forgotten(tmp_path: Path) -> None:
    runs = Runs(tmp_path / "runs")
    kept(runs)
    runs.forget()
    assert not runs.has(SLOT, BATCH)
    runs.forget()
