"""Every part's steps on the CPU, where its figures mean nothing but its way through the engine is the same."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.gpu.results import SectionResults
from bench.gpu.sections import find
from bench.gpu.setting import Setting

DRY = Setting(is_dry=True)


def rehearse(label: str, folder: Path) -> dict[str, Any]:
    part = find(label)
    part.load()(DRY, SectionResults(folder, part.section, is_dry=True), *([part.model] if part.model else []))
    found: dict[str, Any] = json.loads((folder / f"{part.section}.json").read_text())
    assert not found.get("errors"), found["errors"]
    assert all(check["passed"] for check in found.get("checks", ()))
    return found


@pytest.mark.parametrize("label", ["checks/model", "checks/sampling", "checks/memory"])
def test_checks(label: str, tmp_path: Path) -> None:
    assert rehearse(label, tmp_path)["checks"]


@pytest.mark.slow
def test_attention_checks_by_interpretation(tmp_path: Path) -> None:
    checks = rehearse("checks/attention", tmp_path)["checks"]
    assert {check["name"] for check in checks} >= {"triton attention", "triton in graphs", "triton in a large arena"}


@pytest.mark.parametrize(
    ("label", "metric"),
    [
        ("decode/qwen3-8b", "step"),
        ("prefill/llama-3.1-8b", "prompt tokens/s"),
        ("batched/tandem/qwen3-8b", "output tokens/s"),
        ("graphs/qwen3-8b", "host time"),
    ],
)
def test_measurements(label: str, metric: str, tmp_path: Path) -> None:
    rows = [row for row in rehearse(label, tmp_path)["rows"] if row["metric"] == metric]
    assert rows
    assert label.startswith("graphs") or all(row["value"] > 0 for row in rows)


def test_hand_off_between_two_processes(tmp_path: Path) -> None:
    found = rehearse("handoff/qwen3-8b", tmp_path)
    assert {"40 by cuda ipc", "90 by cuda ipc"} <= {check["case"] for check in found["checks"]}
    assert all(row["value"] >= 0 for row in found["rows"])


@pytest.mark.slow
def test_transformers_continuous_batching(tmp_path: Path) -> None:
    assert rehearse("batched/transformers/qwen3-8b", tmp_path)["rows"]
