"""`make bench`: the engine beside `transformers` and beside the hardware's floor, on one random checkpoint, seeded.

Systems take turns on each workload, `--rounds` times; medians are reported. The floor is measured before and after each
run: on shared machines it moves within seconds. `transformers` serves requests one by one, and of the batched workloads
only the first few, from which its rate is taken.
"""

import argparse
import dataclasses
import random
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from bench.checkpoints import SHAPES, random_checkpoint
from bench.floor import fastest_dtype, matmul_rate, read_bandwidth
from bench.load import ForeignLoad, prioritise
from bench.report import Report, Row
from tandem.core.config import EngineConfig
from tandem.core.sampling_params import SamplingParams
from tandem.engine.engine import Engine
from tandem.engine.resolve import build_engine

Prompt = list[int]
Samples = dict[tuple[str, str, str, str], list[float]]
BASELINE_REQUESTS = 3


@dataclasses.dataclass(frozen=True)
class Workload:
    """`num_requests` prompts of `shared` common and `own` distinct tokens, `output` tokens each."""

    name: str
    num_requests: int
    shared: int
    own: int
    output: int
    concurrency: int

    def prompts(self, seed: int) -> list[Prompt]:
        rng = random.Random(f"{self.name}/{seed}")  # NOTE: no workload may find another's prompts in the cache
        prefix = [rng.randrange(10, 4000) for _ in range(self.shared)]
        return [prefix + [rng.randrange(10, 4000) for _ in range(self.own)] for _ in range(self.num_requests)]

    @property
    def is_prefill(self) -> bool:
        return self.output == 1


WORKLOADS = (
    Workload("single 128/128", 1, 0, 128, 128, 1),
    Workload("prefill 1x2048", 1, 0, 2048, 1, 1),
    Workload("prefill 8x512", 8, 0, 512, 1, 8),
    Workload("batch 32x256/64 c16", 32, 0, 256, 64, 16),
    Workload("shared 32x(1024+64)/32", 32, 1024, 64, 32, 32),
)


@dataclasses.dataclass(frozen=True)
class Timing:
    """Times of one run of a workload."""

    wall_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    ttft_s: float
    tpot_s: float | None


def run_tandem(engine: Engine, workload: Workload, seed: int) -> Timing:
    """Closed loop: `concurrency` requests in flight until all are served."""
    prompts = workload.prompts(seed)
    params = SamplingParams(temperature=0.0, max_tokens=workload.output, ignore_eos=True)
    waiting = deque(prompts)
    ttft, tpot = [], []
    started_s = time.perf_counter()
    in_flight = 0
    while waiting or in_flight:
        while waiting and in_flight < workload.concurrency:
            engine.add_request(waiting.popleft(), params)
            in_flight += 1
        for output in engine.step():
            if output.metrics is not None and output.finish_reason is not None:
                in_flight -= 1
                ttft.append(output.metrics.ttft_s or 0.0)
                tpot.append(output.metrics.tpot_s or 0.0)
    wall_s = time.perf_counter() - started_s
    num_output = workload.output * len(prompts)
    return Timing(wall_s, sum(map(len, prompts)), num_output, statistics.median(ttft), statistics.median(tpot))


def run_transformers(model: torch.nn.Module, workload: Workload, seed: int) -> Timing:
    """`generate`, one request after the other, over the first few requests."""
    prompts = workload.prompts(seed)[:BASELINE_REQUESTS]
    ttft = []
    started_s = time.perf_counter()
    for prompt in prompts:
        begun_s = time.perf_counter()
        _generate(model, prompt, workload.output)
        ttft.append(time.perf_counter() - begun_s)
    wall_s = time.perf_counter() - started_s
    tpot_s = None
    if workload.num_requests == 1 and workload.output > 1:
        begun_s = time.perf_counter()
        _generate(model, prompts[0], 1)
        ttft = [time.perf_counter() - begun_s]
        tpot_s = (wall_s - ttft[0]) / (workload.output - 1)
    num_output = workload.output * len(prompts)
    return Timing(wall_s, sum(map(len, prompts)), num_output, statistics.median(ttft), tpot_s)


@torch.inference_mode()
def _generate(model: torch.nn.Module, prompt: Prompt, num_tokens: int) -> None:
    ids = torch.tensor([prompt])
    generated = model.generate(  # type: ignore[operator]
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    assert generated.shape[1] == len(prompt) + num_tokens


class Floors:
    """The least time a workload could take, from bytes over bandwidth and FLOPs over the matmul rate."""

    def __init__(self, shape: str) -> None:
        sizes = SHAPES[shape]
        self._layers = sizes["num_hidden_layers"]
        self._heads, self._kv_heads, self._head_dim = (
            sizes["num_attention_heads"],
            sizes["num_key_value_heads"],
            sizes["head_dim"],
        )
        hidden, ffn = sizes["hidden_size"], sizes["intermediate_size"]
        attention = hidden * self._head_dim * (2 * self._heads + 2 * self._kv_heads)
        layer = attention + 3 * hidden * ffn
        self._layer_weights = self._layers * layer
        self._unasked_weights = layer - 2 * hidden * self._kv_heads * self._head_dim
        self._head_weights = sizes["vocab_size"] * hidden

    def decode_s(self, workload: Workload, bandwidth: float) -> float:
        """Seconds a token at batch 1: every weight and the mean context's KV, read once in bfloat16."""
        context = workload.shared + workload.own + workload.output / 2
        kv = self._layers * 2 * self._kv_heads * self._head_dim * context
        return 2 * (self._layer_weights + self._head_weights + kv) / bandwidth

    def prefill_flops(self, workload: Workload) -> float:
        """Matrix products of all prompt tokens, causal attention, and one row of logits a request; of the last layer
        only K and V but for the last token.
        """
        length = workload.shared + workload.own
        linear = 2 * (self._layer_weights * length - self._unasked_weights * (length - 1) + self._head_weights)
        attention = 2 * self._heads * self._head_dim * (self._layers * length**2 - (length - 1) ** 2)
        return workload.num_requests * (linear + attention)


def measure(shape: str, rounds: int, names: list[str], *, baseline: bool) -> Report:
    path = random_checkpoint(shape)
    engine = build_engine(EngineConfig(model=str(path), max_model_len=4096, max_num_batched_tokens=2048))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16) if baseline else None
    systems: dict[str, Callable[[Workload, int], Timing]] = {"tandem": lambda w, seed: run_tandem(engine, w, seed)}
    if model is not None:
        systems["transformers"] = lambda w, seed: run_transformers(model, w, seed)
    floors = Floors(shape)
    samples: Samples = defaultdict(list)
    shares: Samples = defaultdict(list)
    foreign: dict[tuple[str, str], list[float]] = defaultdict(list)
    run_tandem(engine, WORKLOADS[0], -1)
    for index in range(rounds):
        for workload in WORKLOADS:
            if names and not any(name in workload.name for name in names):
                continue
            for system, run in systems.items():
                before = read_bandwidth(), matmul_rate(fastest_dtype(), 3)
                load = ForeignLoad()
                timing = run(workload, index)
                foreign[workload.name, system].append(load.cores())
                after = read_bandwidth(), matmul_rate(fastest_dtype(), 3)
                bandwidth, rate = (statistics.mean(pair) for pair in zip(before, after, strict=True))
                for metric, unit, value, floor in _figures(workload, timing, floors, bandwidth, rate, system):
                    samples[workload.name, system, metric, unit].append(value)
                    if floor is not None:
                        shares[workload.name, system, metric, unit].append(floor)
                print(f"round {index} · {workload.name} · {system}: {timing.wall_s:.1f} s", flush=True)
    engine.check()
    config = {"shape": shape, "rounds": rounds, "dtype": "bfloat16", "max_num_batched_tokens": 2048, "block_size": 16}
    return Report("engine", config, list(_rows(samples, shares, foreign)), _notes(engine))


def _figures(
    workload: Workload, timing: Timing, floors: Floors, bandwidth: float, rate: float, system: str
) -> Iterator[tuple[str, str, float, float | None]]:
    """(metric, unit, value, floor in the same unit) of one run."""
    if workload.is_prefill:
        scale = timing.num_prompt_tokens / timing.wall_s
        length = workload.num_requests * (workload.shared + workload.own)
        yield "prompt tokens/s", "tok/s", scale, length * rate / floors.prefill_flops(workload)
        return
    yield "TTFT p50", "ms", timing.ttft_s * 1e3, None
    if workload.num_requests == 1:
        assert timing.tpot_s is not None
        yield "TPOT", "ms", timing.tpot_s * 1e3, floors.decode_s(workload, bandwidth) * 1e3
    else:
        if timing.tpot_s is not None:
            yield "TPOT p50", "ms", timing.tpot_s * 1e3, None
        yield "output tokens/s", "tok/s", timing.num_output_tokens / timing.wall_s, None


def _rows(samples: Samples, floors: Samples, foreign: Mapping[tuple[str, str], list[float]]) -> Iterator[Row]:
    for (workload, system, metric, unit), values in samples.items():
        floor_values = floors.get((workload, system, metric, unit))
        value = statistics.median(values)
        floor = share = None
        if floor_values:
            floor = statistics.median(floor_values)
            ratios = [f / v if unit == "ms" else v / f for v, f in zip(values, floor_values, strict=True)]
            share = statistics.median(ratios)
        cores = statistics.median(foreign[workload, system])
        yield Row(workload, system, metric, value, unit, floor, share, tuple(values), cores)


def _notes(engine: Engine) -> list[str]:
    counters = engine.counters
    return [
        f"tandem prefix hits: {counters.num_cached_prompt_tokens} of {counters.num_prompt_tokens} prompt tokens",
        f"transformers serves one by one; batched workloads: the first {BASELINE_REQUESTS} requests",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workload", action="append", default=[], help="part of a workload's name; repeatable")
    parser.add_argument("--no-baseline", action="store_true", help="leave transformers out")
    parser.add_argument("--save", action="store_true", help="keep the JSON under bench/results")
    arguments = parser.parse_args()
    prioritise()
    report = measure(arguments.shape, arguments.rounds, arguments.workload, baseline=not arguments.no_baseline)
    report.print()
    if arguments.save:
        print(f"saved {report.save().relative_to(Path.cwd())}")


if __name__ == "__main__":
    main()
