"""Decode steps of a whole engine at several batches and contexts, as a share of the measured copy bandwidth.

The floor of a step: every weight and all KV of the batch, read once.
"""

import statistics
import time

from bench.gpu.floors import measure_floors
from bench.gpu.models import random_model
from bench.gpu.results import SectionResults
from bench.gpu.setting import Setting
from bench.gpu.stack import Limits, Stack, build, end, fill_with_noise, start_decodes
from bench.report import Row

BATCHES, CONTEXTS = (1, 8, 64, 256), (1024, 8192)
WARM_UP_STEPS, STEPS = 5, 40


def run(setting: Setting, results: SectionResults, name: str) -> None:
    """All batches and contexts of one model."""
    batches, contexts = setting.pick_all(BATCHES, (1, 3)), setting.pick_all(CONTEXTS, (20, 50))
    model = random_model(setting, name, max(contexts) + 2 * (WARM_UP_STEPS + STEPS))
    limits = Limits(model.spec.max_position_embeddings, max(batches), setting.pick(8192, 64))
    started_s = time.perf_counter()
    stack = build(setting, model, limits)
    results.note(f"{name}: engine of {limits} built in {time.perf_counter() - started_s:.1f} s with {stack.system}")
    fill_with_noise(stack.arena, model.spec.dtype)
    for context in contexts:
        for batch in _fitting(stack, batches, context, results):
            with results.guarded(f"{name} decode {batch} x {context}"):
                _measure(setting, results, stack, batch, context)


def _fitting(stack: Stack, batches: tuple[int, ...], context: int, results: SectionResults) -> list[int]:
    """The batches whose KV fits, and in place of the first that does not, the largest that does."""
    length = context + 2 * (WARM_UP_STEPS + STEPS)
    most = int(0.97 * stack.arena.num_pages) // stack.arena.layout.blocks_for(length, length)
    if max(batches) > most:
        results.note(f"{stack.model.name}: KV of at most {most} requests of {context} tokens fits into this device")
    return sorted({min(batch, most) for batch in batches})


def _measure(setting: Setting, results: SectionResults, stack: Stack, batch: int, context: int) -> None:
    floors = measure_floors(setting)
    ids = start_decodes(stack, batch, context, 2 * (WARM_UP_STEPS + STEPS))
    try:
        samples = step_times(stack, batch)
    finally:
        end(stack, ids)
    again = measure_floors(setting)
    bandwidth = statistics.mean((floors.bandwidth, again.bandwidth))
    num_tokens = batch * (context + WARM_UP_STEPS + STEPS / 2)
    floor_s = (stack.model.read_bytes + num_tokens * stack.model.kv_bytes_per_token) / bandwidth
    step_s = statistics.median(samples)
    workload = f"{stack.model.name} decode {batch} x {context}"
    results.row(
        Row(
            workload,
            stack.system,
            "step",
            step_s * 1e3,
            "ms",
            floor_s * 1e3,
            floor_s / step_s,
            tuple(sample * 1e3 for sample in samples),
        )
    )
    results.row(Row(workload, stack.system, "output tokens/s", batch / step_s, "tok/s"))
    results.row(Row(workload, "hardware", "copy bandwidth", bandwidth / 1e9, "GB/s"))


def step_times(stack: Stack, batch: int, steps: int = STEPS) -> list[float]:
    """Seconds of each engine step, from call to tokens, when `batch` requests decode."""
    samples = []
    for index in range(WARM_UP_STEPS + steps):
        started_s = time.perf_counter()
        outputs = stack.engine.step()
        elapsed_s = time.perf_counter() - started_s
        assert len(outputs) == batch, f"{len(outputs)} tokens of {batch}"
        if index >= WARM_UP_STEPS:
            samples.append(elapsed_s)
    return samples
