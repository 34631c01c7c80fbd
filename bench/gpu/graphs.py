"""Parts of a decode step's time: CUDA graph coverage, the host's part, and which kernels and functions are longest.

The host's part of a step is what is left of its wall time after the graph and the head, each timed with the device
never waiting; the sampler's kernels count as the host's, so it is an upper bound.
"""

import cProfile
import io
import pstats
import statistics
from contextlib import suppress
from dataclasses import replace

import torch

from bench.gpu.decode import step_times
from bench.gpu.floors import device_s
from bench.gpu.models import RandomModel, random_model
from bench.gpu.results import Check, SectionResults
from bench.gpu.setting import Setting
from bench.gpu.stack import Limits, Stack, build, end, fill_with_noise, serve, start_decodes
from bench.report import Row
from tandem.architecture.state import KVSpec
from tandem.compute.backends import BACKENDS, choose_backends
from tandem.core.config import EngineConfig
from tandem.core.errors import ConfigurationError
from tandem.kvcache.spec import build_layout

BATCHES, CONTEXT = (1, 64), 1024
MAX_NEW_TOKENS = 400
REPLAYS = 20
PROFILED_STEPS = 20
NUM_LISTED = 15


def run(setting: Setting, results: SectionResults, name: str) -> None:
    """One model's steps, taken apart."""
    batches, context = setting.pick_all(BATCHES, (1, 3)), setting.pick(CONTEXT, 20)
    model = random_model(setting, name, context + 2 * MAX_NEW_TOKENS)
    limits = Limits(model.spec.max_position_embeddings, max(batches), setting.pick(8192, 64))
    if setting.backend == "auto" and not setting.is_dry:
        setting = replace(setting, backend=graph_safe_backend(model, setting.device) or setting.backend)
    stack = build(setting, model, limits)
    if stack.runner.forward.graphs is None:
        results.note(f"left out the graphs of {name}: attention backend {stack.backend.name} is not graph-safe")
        return
    fill_with_noise(stack.arena, model.spec.dtype)
    for batch in batches:
        with results.guarded(f"{name} step of {batch}"):
            _take_apart(setting, results, stack, batch, context)
    with results.guarded(f"{name} coverage"):
        _coverage(setting, results, stack)


def graph_safe_backend(model: RandomModel, device: torch.device) -> str | None:
    """The first in order of preference that serves the model here and can be captured."""
    layout = build_layout(model.spec.kv_specs, EngineConfig(model="").block_size)
    for entry in BACKENDS[KVSpec][device.type]:
        if entry.create(device).graph_safe:
            with suppress(ConfigurationError):
                return str(choose_backends(entry.name, device, layout, model.spec.attention_softcap)[KVSpec].name)
    return None


def _take_apart(setting: Setting, results: SectionResults, stack: Stack, batch: int, context: int) -> None:
    ids = start_decodes(stack, batch, context, MAX_NEW_TOKENS)
    workload = f"{stack.model.name} step of {batch} x {context}"
    try:
        step_s = statistics.median(step_times(stack, batch))
        graph_s, head_s = _graph_s(stack, batch), _head_s(stack, batch)
        for metric, seconds in {
            "step": step_s,
            "graph alone": graph_s,
            "head alone": head_s,
            "host time": step_s - graph_s - head_s,
        }.items():
            results.row(Row(workload, stack.system, metric, seconds * 1e3, "ms"))
        results.row(Row(workload, stack.system, "step without graphs", _eager_s(stack, batch) * 1e3, "ms"))
        with results.guarded(f"{workload}: functions"):
            results.note(f"{workload}, functions by own time over {PROFILED_STEPS} steps:\n{_functions(stack)}")
        with results.guarded(f"{workload}: kernels"):
            _kernels(setting, results, stack, workload)
    finally:
        end(stack, ids)


def _graph_s(stack: Stack, batch: int) -> float:
    """NOTE: private to the graphs, as a replay without its inputs is of no other use."""
    graphs = stack.runner.forward.graphs
    assert graphs is not None
    return device_s(lambda: graphs._replay(batch), stack.device, REPLAYS)


@torch.inference_mode()
def _head_s(stack: Stack, batch: int) -> float:
    hidden = torch.randn(batch, stack.model.spec.hidden_size, device=stack.device).to(torch.bfloat16)
    return device_s(lambda: stack.decoder.logits(hidden), stack.device, REPLAYS)


def _eager_s(stack: Stack, batch: int) -> float:
    graphs, stack.runner.forward.graphs = stack.runner.forward.graphs, None
    try:
        return statistics.median(step_times(stack, batch, PROFILED_STEPS))
    finally:
        stack.runner.forward.graphs = graphs


def _functions(stack: Stack) -> str:
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(PROFILED_STEPS):
        stack.engine.step()
    profile.disable()
    text = io.StringIO()
    pstats.Stats(profile, stream=text).strip_dirs().sort_stats("tottime").print_stats(NUM_LISTED)
    return "\n".join(line[:140] for line in text.getvalue().splitlines() if line.strip())


def _kernels(setting: Setting, results: SectionResults, stack: Stack, workload: str) -> None:
    """Device time of a few steps by kernel, graphs included."""
    kind = torch.profiler.ProfilerActivity.CPU if setting.is_dry else torch.profiler.ProfilerActivity.CUDA
    with torch.profiler.profile(activities=[kind]) as profiler:
        for _ in range(PROFILED_STEPS):
            stack.engine.step()
    attribute = "self_cpu_time_total" if setting.is_dry else "self_device_time_total"
    entries = [(getattr(event, attribute), event.count, event.key) for event in profiler.key_averages()]
    busy_us = sum(entry[0] for entry in entries) / PROFILED_STEPS
    results.row(Row(workload, stack.system, "kernels, profiled", busy_us / 1e3, "ms"))
    longest = sorted(entries, reverse=True)[:NUM_LISTED]
    lines = [f"{us / PROFILED_STEPS:9.1f} us {count / PROFILED_STEPS:7.1f} x {key[:110]}" for us, count, key in longest]
    results.note("\n".join([f"{workload}, kernels a step:", *lines]))


def _coverage(setting: Setting, results: SectionResults, stack: Stack) -> None:
    """Of a served mix: every step that only decodes must be a graph's."""
    runner, vocab_size = stack.runner, stack.model.spec.vocab_size
    before = runner.num_decode_steps, runner.num_mixed_steps, runner.num_eager_decode_steps
    count, num_prompt, concurrency = setting.pick(32, 6), setting.pick(512, 20), setting.pick(16, 2)
    prompts = [[(13 * index + 1) % vocab_size] * (num_prompt + 7 * index) for index in range(count)]
    serve(stack, prompts, setting.pick(64, 5), concurrency)
    after = runner.num_decode_steps, runner.num_mixed_steps, runner.num_eager_decode_steps
    decodes, mixed, eager = (now - then for now, then in zip(after, before, strict=True))
    workload = f"{stack.model.name} {count} x {num_prompt} at concurrency {concurrency}"
    share = 100 * (decodes - eager) / max(1, decodes)
    results.row(Row(workload, stack.system, "decode steps by graphs", share, "%"))
    results.row(Row(workload, stack.system, "steps that hold prefill", 100 * mixed / max(1, decodes + mixed), "%"))
    is_covered = decodes > 0 and eager == 0 and (runner.forward.replays_graphs or setting.is_dry)
    results.check(Check("graph coverage", workload, is_covered, f"{decodes} decode steps, {eager} of them eager"))
