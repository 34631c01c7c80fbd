"""The benchmark of experts counts what a token really hits, and reports medians."""

from pathlib import Path

import pytest

from bench.engine import Timing
from bench.experts import WORKLOADS, Figure, figures, prompt_flops, step_bytes, summary
from tandem.architecture.cost import ModelCost, read_cost
from tandem.architecture.fields import read_json_object
from tests.helpers import checkpoints

SINGLE, PREFILL, BATCH = WORKLOADS
ACTIVE = {  # elements of a layer: attention, router, and 2 of 8 experts
    "attention": 2 * 64 * 64 + 2 * 64 * 32,
    "router": 8 * 64,
    "experts": 2 * 3 * 64 * 64,
}


@pytest.fixture
def cost(tmp_path: Path) -> ModelCost:
    path = checkpoints.save_tiny_mixtral(tmp_path, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2)
    return read_cost(read_json_object(path / "config.json"), "tiny")


def test_a_step_reads_the_experts_that_it_hits_and_no_other(cost: ModelCost) -> None:
    weights = 2 * sum(ACTIVE.values()) + 199 * 64
    kv = 2 * 2 * 32 * (128 + 64)  # layers, K and V, heads, context
    assert step_bytes(cost, SINGLE) == 2 * (weights + kv)


def test_figures_are_beside_their_floors(cost: ModelCost) -> None:
    single = Timing(wall_s=2.0, num_prompt_tokens=128, num_output_tokens=128, ttft_s=0.1, tpot_s=0.01)
    [(_, _, value, floor)] = figures(SINGLE, single, cost, 1e9, 1e12)
    assert (value, floor) == (100.0, 1e9 / step_bytes(cost, SINGLE))
    prefill = Timing(wall_s=2.0, num_prompt_tokens=1024, num_output_tokens=1, ttft_s=2.0, tpot_s=None)
    [(_, _, value, floor)] = figures(PREFILL, prefill, cost, 1e9, 1e12)
    assert (value, floor) == (512.0, 1024 * 1e12 / prompt_flops(cost, PREFILL))
    batch = Timing(wall_s=4.0, num_prompt_tokens=8192, num_output_tokens=2048, ttft_s=0.1, tpot_s=0.1)
    assert list(figures(BATCH, batch, cost, 1e9, 1e12)) == [("output tokens/s", "tok/s", 512.0, None)]


def test_rows_are_medians_and_shares_those_of_each_run() -> None:
    runs: list[tuple[float, list[Figure]]] = [
        (0.1, [("rate", "tok/s", 10.0, 20.0)]),
        (0.5, [("rate", "tok/s", 30.0, 40.0)]),
        (0.2, [("rate", "tok/s", 20.0, 100.0)]),
    ]
    [row] = summary("single", "tandem", runs)
    assert (row.value, row.floor, row.share, row.foreign_cores) == (20, 40, 0.5, 0.2)
    assert row.samples == (10, 30, 20)
