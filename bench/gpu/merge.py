"""From the sections' files to one report: rows, what was wrong, and the ratio to the baseline."""

import json
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.gpu.sections import SECTIONS
from bench.report import RESULTS, Report, Row

SUMMARY = "gpu.json"


def merge(folder: Path, git_sha: str | None = None) -> Report:
    """Everything in `folder`. `git_sha`: of the tree that was measured, where the machine could not tell.

    Raises:
        FileNotFoundError: there are no results.
    """
    found = [json.loads((folder / f"{name}.json").read_text()) for name in _present(folder)]
    if not found:
        raise FileNotFoundError(f"{folder} holds no results of bench.gpu")
    rows = [_row(entry) for section in found for entry in section.get("rows", ())]
    machine: dict[str, Any] = next((section["machine"] for section in found if "machine" in section), {})
    if machine.get("git_sha", "unknown") == "unknown":
        machine |= {"git_sha": git_sha or "unknown"}
    config = {
        "dry": any(section["dry"] for section in found),
        "sections": [section["section"] for section in found],
        "checks": [check | {"section": section["section"]} for section in found for check in section.get("checks", ())],
        "errors": [error | {"section": section["section"]} for section in found for error in section.get("errors", ())],
        "took": [entry for section in found for entry in section.get("took", ())],
    }
    notes = [note for section in found for note in section.get("notes", ())]
    return Report("gpu", config, [*rows, *_ratios(rows)], notes, machine)


def summary(report: Report) -> str:
    """A line a figure, a wrong check and a failure, then one of all."""
    figures = [_shown(row) for row in report.rows]
    wrong = [check for check in report.config["checks"] if not check["passed"]]
    errors = report.config["errors"]
    lines = [f"WRONG: {check['name']} · {check['case']} · {check['detail']}" for check in wrong]
    lines += [f"FAILED: {error['what']}: {_gist(error['error'])}" for error in errors]
    num_passed = len(report.config["checks"]) - len(wrong)
    lines.append(f"{num_passed} checks passed, {len(wrong)} wrong, {len(errors)} failures, {len(report.rows)} figures")
    return "\n".join(figures + lines)


def _shown(row: Row) -> str:
    share = "" if row.share is None else f" = {row.share:.0%} of {row.floor:.5g}"
    return f"{row.workload} · {row.system} · {row.metric}: {row.value:.5g} {row.unit}{share}"


def _gist(error: str) -> str:
    """The last line of a traceback, the first of anything else."""
    lines = error.strip().splitlines()
    return lines[-1 if lines[0].startswith("Traceback") else 0][:200]


def save(report: Report) -> Path:
    """Under bench/results, like any other report.

    Raises:
        ValueError: it was a rehearsal.
    """
    if report.config["dry"]:
        raise ValueError("these results are of a dry run; nothing was measured, so nothing is kept")
    return report.save()


def local_git_sha() -> str | None:
    """Of the tree that this file is in."""
    command = ["git", "rev-parse", "HEAD"]
    done = subprocess.run(command, cwd=RESULTS.parent, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def _present(folder: Path) -> list[str]:
    return [name for name in SECTIONS if (folder / f"{name}.json").exists()]


def _row(entry: dict[str, Any]) -> Row:
    return replace(Row(**entry), samples=tuple(entry["samples"]))


def _ratios(rows: Sequence[Row]) -> Iterator[Row]:
    """Of ours to `transformers`, where both were measured."""
    batched = [row for row in rows if " batched " in row.workload]
    for ours in batched:
        for theirs in batched:
            if (
                ours.workload == theirs.workload
                and ours.system.startswith("tandem")
                and "transformers" in theirs.system
            ):
                yield Row(ours.workload, f"{ours.system} / {theirs.system}", "ratio", ours.value / theirs.value, "x")
