"""Mixture of experts: the engine beside `transformers` and beside the read bandwidth, on one random checkpoint, seeded.

The floor of a single stream is the time in which the bytes that a token really hits (all but the experts that its
router left out, and the context's KV) come from memory, at the bandwidth measured before and after the run. Systems
take turns. `transformers` serves requests one by one, and of a batched workload the first few.
"""

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from bench.checkpoints import EXPERT_SHAPES, random_checkpoint
from bench.engine import BASELINE_REQUESTS, Timing, Workload, run_tandem, run_transformers
from bench.floor import fastest_dtype, matmul_rate, read_bandwidth
from bench.load import ForeignLoad, prioritise
from bench.report import Report, Row
from tandem.architecture.cost import ModelCost, read_cost
from tandem.core.config import EngineConfig
from tandem.engine.resolve import build_engine

WORKLOADS = (
    Workload("single 128/128", 1, 0, 128, 128, 1),
    Workload("prefill 1x1024", 1, 0, 1024, 1, 1),
    Workload("batch 32x256/64 c16", 32, 0, 256, 64, 16),
)

Figure = tuple[str, str, float, float | None]
"""Metric, unit, value, and the floor in the same unit."""


def step_bytes(cost: ModelCost, workload: Workload) -> float:
    """Bytes that one decoded token of a single stream reads, its context taken at half of its answer."""
    context = workload.shared + workload.own + workload.output / 2
    return cost.num_active_parameters * cost.weight_bits / 8 + cost.read_bytes(context)


def prompt_flops(cost: ModelCost, workload: Workload) -> float:
    """Of all prompts: products with what each token is multiplied by, attention, and one row of logits a request.

    NOTE: the last layer computes few tokens past K and V; that is not taken off, so the floor is a little high.
    """
    length = workload.shared + workload.own
    linear = 2 * (cost.num_prompt_parameters * length + cost.num_table_parameters)
    return workload.num_requests * (linear + cost.attention_flops(length))


def figures(workload: Workload, timing: Timing, cost: ModelCost, bandwidth: float, rate: float) -> Iterator[Figure]:
    """Throughput of one run, with the limit by bandwidth or arithmetic where there is one."""
    if workload.is_prefill:
        length = workload.num_requests * (workload.shared + workload.own)
        floor = length * rate / prompt_flops(cost, workload)
        yield "prompt tokens/s", "tok/s", timing.num_prompt_tokens / timing.wall_s, floor
    elif workload.num_requests == 1:
        assert timing.tpot_s is not None
        yield "decode tokens/s", "tok/s", 1 / timing.tpot_s, bandwidth / step_bytes(cost, workload)
    else:
        yield "output tokens/s", "tok/s", timing.num_output_tokens / timing.wall_s, None


def measure(shape: str, rounds: int, *, baseline: bool) -> Report:
    path = random_checkpoint(shape)
    cost = read_cost(json.loads((path / "config.json").read_text()), shape)
    engine = build_engine(EngineConfig(model=str(path), max_model_len=4096, max_num_batched_tokens=1024))
    systems: dict[str, Callable[[Workload, int], Timing]] = {"tandem": lambda w, seed: run_tandem(engine, w, seed)}
    if baseline:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
        systems["transformers"] = lambda w, seed: run_transformers(model, w, seed)
    found: dict[tuple[str, str], list[tuple[float, list[Figure]]]] = defaultdict(list)
    run_tandem(engine, WORKLOADS[0], -1)
    for index in range(rounds):
        for workload in WORKLOADS:
            for system, run in systems.items():
                before = read_bandwidth(), matmul_rate(fastest_dtype(), 3)
                load = ForeignLoad()
                timing = run(workload, index)
                foreign = load.cores()
                after = read_bandwidth(), matmul_rate(fastest_dtype(), 3)
                bandwidth, rate = (statistics.mean(pair) for pair in zip(before, after, strict=True))
                found[workload.name, system].append((foreign, list(figures(workload, timing, cost, bandwidth, rate))))
                print(f"round {index} · {workload.name} · {system}: {timing.wall_s:.1f} s", flush=True)
    engine.check()
    config = {
        "shape": shape,
        "rounds": rounds,
        "dtype": "bfloat16",
        "parameters": cost.num_parameters,
        "active_parameters": cost.num_active_parameters,
        "hit_bytes": step_bytes(cost, WORKLOADS[0]),
    }
    rows = [row for (workload, system), runs in found.items() for row in summary(workload, system, runs)]
    return Report("experts", config, rows, [f"transformers serves one by one: the first {BASELINE_REQUESTS} requests"])


def summary(workload: str, system: str, runs: list[tuple[float, list[Figure]]]) -> Iterator[Row]:
    """One row for each figure that every run has: medians."""
    foreign = statistics.median(load for load, _ in runs)
    for same in zip(*(figures for _, figures in runs), strict=True):
        metric, unit, *_ = same[0]
        values = tuple(value for _, _, value, _ in same)
        floors = [floor for *_, floor in same if floor is not None]
        shares = [value / floor for value, floor in zip(values, floors, strict=False)]
        yield Row(
            workload,
            system,
            metric,
            statistics.median(values),
            unit,
            statistics.median(floors) if floors else None,
            statistics.median(shares) if shares else None,
            values,
            foreign,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=EXPERT_SHAPES, default="experts-1.2b")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-baseline", action="store_true", help="leave transformers out")
    parser.add_argument("--save", action="store_true", help="keep the JSON under bench/results")
    arguments = parser.parse_args()
    prioritise()
    report = measure(arguments.shape, arguments.rounds, baseline=not arguments.no_baseline)
    report.print()
    if arguments.save:
        print(f"saved {report.save().relative_to(Path.cwd())}")


if __name__ == "__main__":
    main()
