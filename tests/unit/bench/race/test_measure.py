"""Floors and the figures they stand beside."""

from dataclasses import replace

import pytest

from bench.race.measure import budget, floors
from bench.race.metrics import METRICS
from bench.race.system import Served
from bench.race.work import ModelCost, Rates
from bench.race.workloads import WORKLOADS, Workload
from tests.unit.bench.race.test_work import SIZES

COST, RATES = ModelCost(SIZES), Rates(read_bandwidth=1e9, matmul=1e9)
BY_KEY: dict[str, Workload] = {workload.key: workload for workload in WORKLOADS}


@pytest.mark.parametrize(
    ("key", "names"),
    [
        ("single", {"TTFT p50", "TPOT p50", "output rate"}),
        ("prefill-1", {"prompt rate"}),
        ("prefill-8", {"prompt rate"}),
        ("batch", {"output rate"}),
        ("shared", {"output rate"}),
        ("turns", {"output rate"}),
        ("burst", set()),
    ],
)
def test_only_figures_with_a_bound_of_their_own_have_a_floor(key: str, names: set[str]) -> None:
    found = floors(BY_KEY[key], COST, RATES)
    assert found.keys() == names
    assert found.keys() <= METRICS.keys()


def test_a_stream_alone_is_bound_by_reading_weights_and_context() -> None:
    """In ms: 127 steps over 128 to 255 tokens of context."""
    found = floors(BY_KEY["single"], COST, RATES)
    read = COST.weight_bytes + 32 * (128 + 255) / 2
    assert found["TPOT p50"] == pytest.approx(1e3 * read / 1e9)


def test_prompts_are_bound_by_products() -> None:
    work = BY_KEY["prefill-8"].work()
    assert work is not None
    assert floors(BY_KEY["prefill-8"], COST, RATES)["prompt rate"] == pytest.approx(8 * 512 * 1e9 / COST.flops(work))


def test_rates_of_answers_count_every_token_of_every_answer() -> None:
    work = BY_KEY["batch"].work()
    assert work is not None
    assert floors(BY_KEY["batch"], COST, RATES)["output rate"] == pytest.approx(32 * 64 / COST.floor_s(work, RATES))


def test_a_faster_machine_has_lower_floors() -> None:
    twice = replace(RATES, read_bandwidth=2e9, matmul=2e9)
    for workload in WORKLOADS:
        here, there = floors(workload, COST, RATES), floors(workload, COST, twice)
        for name, value in here.items():
            assert METRICS[name].better_by(there[name], value) == pytest.approx(2.0)


def test_what_its_processes_may_take_is_weights_once_the_pools_and_a_little() -> None:
    """In MB; of a system that does not say what its KV cache takes, nothing is asked."""
    served = Served("http://127.0.0.1:1", "m", (), kv_cache_bytes=6_000_000)
    assert budget(COST, served) == {"peak memory": (COST.weight_bytes + 306_000_000) / 1e6}
    assert budget(COST, replace(served, kv_cache_bytes=0)) == {}


def test_without_readings_there_are_no_floors() -> None:
    assert floors(BY_KEY["single"], COST, Rates(0.0, 0.0)) == {}
