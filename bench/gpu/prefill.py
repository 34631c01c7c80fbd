"""Prompts of several lengths through a whole engine, one at a time, as a share of the measured matmul rate."""

import random
import statistics

from bench.gpu.floors import measure_floors, wall_s
from bench.gpu.models import random_model
from bench.gpu.results import SectionResults
from bench.gpu.setting import Setting
from bench.gpu.stack import Limits, Stack, build, serve
from bench.report import Row

LENGTHS = (2048, 8192, 32768)
REPEATS = 3


def run(setting: Setting, results: SectionResults, name: str) -> None:
    """All lengths of one model, in chunks of the engine's own size."""
    lengths = setting.pick_all(LENGTHS, (16, 64, 150))
    model = random_model(setting, name, max(lengths) + 16)
    limits = Limits(model.spec.max_position_embeddings, 4, setting.pick(8192, 64))
    stack = build(setting, model, limits)
    for length in lengths:
        with results.guarded(f"{name} prefill {length}"):
            _measure(setting, results, stack, length)


def _measure(setting: Setting, results: SectionResults, stack: Stack, length: int) -> None:
    rng = random.Random(length)
    prompt = [rng.randrange(stack.model.spec.vocab_size) for _ in range(length)]
    before = measure_floors(setting).matmul
    samples = wall_s(lambda: serve(stack, [prompt], 1, 1), stack.device, REPEATS)
    rate = statistics.mean((before, measure_floors(setting).matmul))
    floor_s = stack.model.prefill_flops(length) / rate
    seconds = statistics.median(samples)
    workload = f"{stack.model.name} prefill {length}"
    figures = tuple(length / sample for sample in samples)
    results.row(
        Row(
            workload,
            stack.system,
            "prompt tokens/s",
            length / seconds,
            "tok/s",
            length / floor_s,
            floor_s / seconds,
            figures,
        )
    )
    results.row(Row(workload, "hardware", "matmul", rate / 1e12, "TFLOP/s"))
