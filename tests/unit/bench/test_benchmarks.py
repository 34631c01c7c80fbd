"""Every benchmark runs, at a size that says nothing about speed, and leaves figures. `overhead` and `engine` have tests
of their own beside this one.
"""

import importlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.core.errors import ConfigurationError

NUM_TRACED = 40
DEMO = Path(__file__).parents[3] / "demo" / "tandem-demo"
CHUNK = 512  # tokens behind one id of the trace


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Requests of which every other begins as the one before."""
    path = tmp_path_factory.mktemp("traces") / "trace.jsonl"
    requests = (
        {
            "timestamp": 500 * number,
            "input_length": 3 * CHUNK,
            "output_length": 20,
            "hash_ids": [number // 2, 1000 + number, 2000 + number],
        }
        for number in range(NUM_TRACED)
    )
    path.write_text("".join(json.dumps(request) + "\n" for request in requests))
    return path


def run(monkeypatch: pytest.MonkeyPatch, name: str, *arguments: str) -> None:
    module = importlib.import_module(f"bench.{name}")
    monkeypatch.setattr(module, "prioritise", lambda: None, raising=False)
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    module.main()


def figures(capsys: pytest.CaptureFixture[str]) -> dict[tuple[str, str, str], float]:
    """By workload, system and metric, from the JSON line that ends a report."""
    line = next(line for line in reversed(capsys.readouterr().out.splitlines()) if line.startswith("{"))
    found = {(row["workload"], row["system"], row["metric"]): row["value"] for row in json.loads(line)["rows"]}
    assert all(math.isfinite(value) for value in found.values()), found
    return found


QUICK = {
    "churn": "--workers 8 --minutes 10",
    "locality": "--workers 8 --replicas 20000 --asked 5",
    "pairing": "--workers 16 --replicas 80000 --prompt-tokens 2000 --asked 5",
    "planner": "--trace TRACE --copies 1 --pools 1 1 --startups 30 --policies fixed --jobs 1",
    "routing": "--trace TRACE --num-workers 2 --policies random --sizes 16",
    "speculate": "--model MODEL --workloads chat --batches 2 --tokens 8 --rounds 1",
}
SLOW = {
    "cancel_recovery": "--tokens 512 --rounds 1",
    "constraints": "--shape small --num-rows 2 --num-steps 3 --rounds 1",
    "draft_rates": "--acceptance 1 --batches 2 --tokens 8 --rounds 1",
    "disaggregation": "--lengths 512 --rounds 1 --throughput-rounds 1",
    "gateway": "--requests 20 --streams 1,4 --rounds 1",
    "rank_exchange": "--kilobytes 1 --rounds 20",
    "rank_steps": "--widths 2 --batches 2 --steps 4 --chunk-tokens 256",
    "transfer": "--megabytes 16 --rounds 1",
    "turns": "--lengths 1000 --new 100 --rounds 1 --agents 3 --agent-tokens 2000",
}


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_it_runs_and_leaves_figures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], trace: Path, name: str
) -> None:
    arguments = (QUICK | SLOW)[name].replace("TRACE", str(trace)).replace("MODEL", str(DEMO))
    run(monkeypatch, name, *arguments.split())
    assert figures(capsys)


def test_threads_of_pytorch_wait_as_in_workers() -> None:
    """They read how once, when PyTorch is imported, which benchmarks did before they imported `tandem`."""
    code = "import bench, sys; assert 'torch' not in sys.modules; import torch"
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environment["OMP_DISPLAY_ENV"] = "true"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in found.stderr


def test_an_index_too_small_for_the_prompts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match=r"the prompts alone are [\d,]+ replicas; ask for more"):
        run(monkeypatch, "pairing", "--workers", "16", "--replicas", "1000", "--asked", "5")


def test_a_run_too_short_for_growth_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, "churn", "--minutes", "5")
    assert "--minutes 5: growth takes two readings, 10 minutes" in capsys.readouterr().err
