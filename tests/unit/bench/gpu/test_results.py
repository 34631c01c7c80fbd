"""Results of a run: whole at any time, merged into one report, and nothing of a rehearsal is kept."""

import json
from pathlib import Path

import pytest

from bench.gpu.merge import merge, save, summary
from bench.gpu.results import Check, SectionResults
from bench.report import Row

OURS = Row("m batched 4 x 2/1", "tandem, triton", "output tokens/s", 30.0, "tok/s")
THEIRS = Row("m batched 4 x 2/1", "transformers continuous batching, sdpa", "output tokens/s", 10.0, "tok/s")


def filled(folder: Path, *, is_dry: bool = False) -> None:
    batched = SectionResults(folder, "batched", is_dry=is_dry)
    batched.describe({"date": "2026-01-02T03:04:05+00:00", "git_sha": "unknown", "gpu": "one"})
    batched.row(OURS)
    batched.row(THEIRS)
    checks = SectionResults(folder, "checks", is_dry=is_dry)
    checks.check(Check("a", "case", True))
    checks.check(Check("b", "case", False, "max error 3"))


def test_every_entry_is_on_disk_at_once_and_later_parts_append(tmp_path: Path) -> None:
    SectionResults(tmp_path, "decode", is_dry=False).row(OURS)
    second = SectionResults(tmp_path, "decode", is_dry=False)
    second.note("later")
    found = json.loads((tmp_path / "decode.json").read_text())
    assert [row["value"] for row in found["rows"]] == [30.0]
    assert found["notes"] == ["later"]
    assert [path.name for path in tmp_path.iterdir()] == ["decode.json"]


def test_a_failure_is_a_result_and_what_follows_goes_on(tmp_path: Path) -> None:
    results = SectionResults(tmp_path, "decode", is_dry=False)
    with results.guarded("first"):
        int("out of luck")
    with results.guarded("second"):
        results.row(OURS)
    report = merge(tmp_path)
    assert [error["what"] for error in report.config["errors"]] == ["first"]
    assert "FAILED: first: ValueError: invalid literal" in summary(report)
    assert report.rows == [OURS]
    assert [entry["part"] for entry in report.config["took"]] == ["first", "second"]


def test_merging_adds_the_ratio_and_says_what_was_wrong(tmp_path: Path) -> None:
    filled(tmp_path)
    report = merge(tmp_path, "abc")
    ratio = report.rows[-1]
    assert (ratio.metric, ratio.value, ratio.unit) == ("ratio", 3.0, "x")
    assert report.circumstances["git_sha"] == "abc"
    assert report.circumstances["gpu"] == "one"
    assert "WRONG: b · case · max error 3" in summary(report)
    assert "1 checks passed, 1 wrong, 0 failures" in summary(report)


def test_a_rehearsal_is_never_saved(tmp_path: Path) -> None:
    filled(tmp_path, is_dry=True)
    with pytest.raises(ValueError, match="dry run"):
        save(merge(tmp_path))


def test_merging_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no results"):
        merge(tmp_path)
