"""Everything of a decode step but the model, as requests and contexts grow.

The engine is the real one: scheduler, block accounting with events, inputs, sampling, detokenising, stop strings. Only
the decoder is a stand-in that returns finished logits at once, so KV needs no memory and a context can be anything.
`share` compares with the steps of Qwen3-0.6B's shape at short contexts (`MODEL_STEP_S`; `--model-steps` measures them
again): long contexts make the model's step longer and the share smaller.
"""

import argparse
import dataclasses
import itertools
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import torch

from bench.checkpoints import SHAPES, random_checkpoint
from bench.constraints import word_tokenizer
from bench.load import ForeignLoad, prioritise
from bench.report import Report, Row
from tandem.architecture.model import ModelSpec
from tandem.architecture.state import KVSpec
from tandem.architecture.tensors import NormSpec
from tandem.compute.arena import Arena
from tandem.compute.attention import Backends
from tandem.compute.backends import choose_backends
from tandem.compute.layer_states import LayerKV
from tandem.compute.native.sampling import load_draws
from tandem.compute.step import AttentionBatch, HiddenStates, LayerTurns, WantedTokens
from tandem.core.config import EngineConfig, SchedulerConfig
from tandem.core.events import BlockEvent
from tandem.core.sampling_params import SamplingParams
from tandem.engine.engine import Engine
from tandem.engine.executor import Executor, StepHandle
from tandem.engine.forward_pass import ForwardPass
from tandem.engine.identity import ModelIdentity
from tandem.engine.resolve import build_engine
from tandem.engine.runner import ModelRunner
from tandem.kvcache.manager import KVCacheManager
from tandem.kvcache.spec import build_layout
from tandem.models.decoder import Decoder
from tandem.scheduler.output import SchedulerOutput
from tandem.scheduler.scheduler import Scheduler
from tandem.text.tokenizer import Tokenizer

VOCAB_SIZE = SHAPES["qwen3-0.6b"]["vocab_size"]
BLOCK_SIZE = 16
SPEC = KVSpec(num_kv_heads=1, head_dim=8, dtype="bfloat16")
NUMS_REQUESTS = (1, 64, 256, 1024)
SHORT, LONG = 1024, 128 * 1024
MAX_BATCHED_TOKENS = 1 << 20
FEW = 4  # tokens of a real model's prompts
WARM_UP_STEPS = 3
STOP = "\n\nHuman:"
MODEL_STEP_S = {1: 0.032, 64: 0.137, 256: 0.661, 1024: 2.112}
PHASES = ("schedule", "inputs", "sample", "update and outputs")
GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95)


@dataclasses.dataclass(frozen=True)
class Case:
    """One way of choosing tokens. `exponent`: the r-th likeliest token has probability ~ r^-exponent; 0 = all alike,
    but for noise, as random weights have it.
    """

    name: str
    params: SamplingParams
    exponent: float


CASES = (
    Case("greedy", GREEDY, 1.2),
    Case("sampled", SAMPLED, 1.2),
    Case("top-k 50", SamplingParams(temperature=0.8, top_p=0.95, top_k=50), 1.2),
    Case("sampled, flat", SAMPLED, 0.0),
)


class StandInDecoder:
    """Returns the same logits every step; notes when a step came to it and left it."""

    graph_safe = True

    def __init__(self, num_rows: int) -> None:
        self.logits_of_rows = torch.empty(num_rows, VOCAB_SIZE)
        self.entered_s = self.left_s = 0.0

    def prepare(self, exponent: float) -> None:
        """Logits of another shape, seeded."""
        generator = torch.Generator().manual_seed(0)
        ranked = -exponent * torch.arange(1, VOCAB_SIZE + 1).log()
        for row in self.logits_of_rows:
            row.copy_(ranked[torch.randperm(VOCAB_SIZE, generator=generator)])
            row += torch.randn(VOCAB_SIZE, generator=generator) * 0.1

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv: Sequence[LayerKV],
        batches: Sequence[AttentionBatch],
        backends: Backends,
        wanted: WantedTokens | None = None,
        states: HiddenStates | None = None,
        received: torch.Tensor | None = None,
        turns: LayerTurns | None = None,
    ) -> torch.Tensor:
        self.entered_s = time.perf_counter()
        return (input_ids if wanted is None else input_ids[wanted.rows]).unsqueeze(1)

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
        self.left_s = time.perf_counter()
        return self.logits_of_rows[: len(hidden if rows is None else rows)]


class TimedExecutor:
    """Notes when a step came to the runner and left it; `used_s`: this thread's processor time between."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.entered_s = self.left_s = self.used_s = 0.0

    def submit(self, step: SchedulerOutput) -> StepHandle:
        self.entered_s, used_s = time.perf_counter(), time.thread_time()
        handle = self._executor.submit(step)
        self.left_s, self.used_s = time.perf_counter(), time.thread_time() - used_s
        return handle


class Bench:
    """One engine without a model."""

    def __init__(self, tokenizer: Tokenizer, num_blocks: int, longest: int = LONG) -> None:
        layout = build_layout((SPEC,), BLOCK_SIZE)
        self.num_events = 0
        kv = KVCacheManager(layout, num_blocks, max_chunk_tokens=MAX_BATCHED_TOKENS, emit=self._count)
        limits = SchedulerConfig(
            max_num_batched_tokens=MAX_BATCHED_TOKENS, max_num_running=max(NUMS_REQUESTS), max_model_len=longest + 4096
        )
        device = torch.device("cpu")
        self.decoder = StandInDecoder(max(NUMS_REQUESTS))
        forward = ForwardPass(
            cast(Decoder, self.decoder),
            _spec(2 * longest),
            Arena(layout, 1, device),
            choose_backends("auto", device, layout, 0.0),
            max_num_requests=limits.max_num_running,
            max_model_len=limits.max_model_len,
        )
        self.executor = TimedExecutor(ModelRunner(forward, draws=load_draws()))
        identity = ModelIdentity("bench", VOCAB_SIZE, (VOCAB_SIZE - 1,))
        self.engine = Engine(self.executor, Scheduler(limits, kv), kv, identity, tokenizer=tokenizer)
        rng = random.Random(0)
        self._words = [rng.randrange(VOCAB_SIZE - 1) for _ in range(LONG)]

    def _count(self, event: BlockEvent) -> None:
        self.num_events += 1

    def prompt(self, index: int, num_tokens: int) -> list[int]:
        """No two share a block; their lengths differ within a block, so that not all need one in the same step."""
        return [index, *self._words[1 : num_tokens - index % BLOCK_SIZE]]

    def fill(self, contexts: Sequence[int], params: SamplingParams) -> None:
        """Have a request decoding for each context."""
        for index, num_tokens in enumerate(contexts):
            seeded = dataclasses.replace(params, seed=index, ignore_eos=True, max_tokens=3000, stop=(STOP,))
            self.engine.add_request(self.prompt(index, num_tokens), seeded, request_id=f"r{index}")
        while self.engine.num_running < len(contexts) or self.engine.load().num_prompts:
            self.engine.step()
        for _ in range(WARM_UP_STEPS):
            self.engine.step()

    def phases(self) -> tuple[float, ...]:
        """Seconds of one step's parts."""
        started_s = time.perf_counter()
        outputs = self.engine.step()
        ended_s = time.perf_counter()
        assert len(outputs) == self.engine.num_running
        times = (started_s, self.executor.entered_s, self.decoder.entered_s)
        before = tuple(end - start for start, end in itertools.pairwise(times))
        return (*before, self.executor.left_s - self.decoder.left_s, ended_s - self.executor.left_s)

    def clear(self) -> None:
        """Abort everything."""
        for request_id in [f"r{index}" for index in range(max(NUMS_REQUESTS))]:
            self.engine.abort(request_id)
        self.engine.step()


def _spec(max_position_embeddings: int) -> ModelSpec:
    return ModelSpec(
        family="bench",
        hidden_size=8,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=max_position_embeddings,
        layers=(),
        final_norm=NormSpec("model.norm", 8, 1e-6),
        dtype="bfloat16",
        tie_word_embeddings=True,
        eos_token_ids=(VOCAB_SIZE - 1,),
    )


Samples = dict[tuple[str, str], list[float]]


def contexts_of(num_requests: int, num_long: int) -> dict[str, list[int]]:
    """By name: all short, and up to `num_long` of them long."""
    long = min(num_requests, num_long)
    name = "128k" if long == num_requests else f"{long} of 128k, the rest 1k"
    return {"1k": [SHORT] * num_requests, name: [LONG] * long + [SHORT] * (num_requests - long)}


def measure_steps(
    bench: Bench, cases: Sequence[Case], num_long: int, rounds: int, steps_s: Mapping[int, float]
) -> list[Row]:
    rows = []
    for case in cases:
        bench.decoder.prepare(case.exponent)
        for num_requests in NUMS_REQUESTS:
            for name, contexts in contexts_of(num_requests, num_long).items():
                bench.fill(contexts, case.params)
                load = ForeignLoad()
                steps = [bench.phases() for _ in range(rounds if num_requests > 1 else 8 * rounds)]
                cores = load.cores()
                bench.clear()
                rows += _step_rows(f"{case.name} · {num_requests} x {name}", steps, steps_s[num_requests], cores)
                print(f"{rows[-5].workload}: {rows[-5].value:.2f} ms", flush=True)
    return rows


def _step_rows(workload: str, steps: Sequence[tuple[float, ...]], model_s: float, cores: float) -> list[Row]:
    totals = [sum(phases) for phases in steps]
    total_s = statistics.median(totals)
    share = total_s / (total_s + model_s)
    whole = Row(
        workload, "tandem", "overhead", total_s * 1e3, "ms", (total_s + model_s) * 1e3, share, tuple(totals), cores
    )
    parts = [
        Row(workload, "tandem", phase, statistics.median(times) * 1e3, "ms", foreign_cores=cores)
        for phase, times in zip(PHASES, zip(*steps, strict=True), strict=True)
    ]
    return [whole, *parts]


def measure_arrival(bench: Bench, rounds: int) -> list[Row]:
    """A prompt's way in: `add_request`, and the first step's scheduling, computed for the first time and cached."""
    samples: dict[tuple[str, str], list[float]] = defaultdict(list)
    load = ForeignLoad()
    for index in range(rounds):
        for num_tokens in (SHORT, LONG):
            prompt = bench.prompt(1000 + 10 * index, num_tokens)
            for state in ("new", "cached"):
                started_s = time.perf_counter()
                bench.engine.add_request(prompt, dataclasses.replace(GREEDY, max_tokens=2), request_id="r0")
                samples[f"{num_tokens} tokens, {state}", "add_request"].append(time.perf_counter() - started_s)
                started_s = time.perf_counter()
                bench.engine.step()
                samples[f"{num_tokens} tokens, {state}", "first step"].append(time.perf_counter() - started_s)
                bench.clear()
    cores = load.cores()
    return [
        Row(workload, "tandem", metric, statistics.median(times) * 1e3, "ms", samples=tuple(times), foreign_cores=cores)
        for (workload, metric), times in samples.items()
    ]


def measure_model(model: str, num_steps: int) -> dict[int, float]:
    """Decode steps of a real model at short contexts: seconds by number of requests. Takes minutes."""
    most = max(NUMS_REQUESTS)
    config = EngineConfig(
        model,
        max_model_len=64,
        max_num_batched_tokens=most * FEW,  # NOTE: all prompts in one step, so that all requests decode together
        max_num_running=most,
        kv_cache_bytes=4 << 30,
    )
    found = {}
    for num_requests in NUMS_REQUESTS:
        engine = build_engine(config)
        try:
            for index in range(num_requests):
                params = dataclasses.replace(GREEDY, max_tokens=num_steps + 2, ignore_eos=True)
                engine.add_request([index] * FEW, params)
            while engine.has_work:
                engine.step()
            steps = [stats.duration_s for stats in engine.take_step_stats() if stats.num_decodes == num_requests]
        finally:
            engine.close()
        found[num_requests] = statistics.median(steps[1:])
        print(f"a step of {num_requests} requests takes {found[num_requests]:.3f} s", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8, help="steps measured in each case")
    parser.add_argument("--num-long", type=int, default=64, help="requests of 128k tokens at once, at most")
    parser.add_argument("--case", action="append", default=[], help="part of a case's name; repeatable")
    parser.add_argument(
        "--model-steps", type=int, default=0, help="measure so many real steps instead of taking known times"
    )
    parser.add_argument("--save", action="store_true", help="keep the JSON under bench/results")
    arguments = parser.parse_args()
    prioritise()
    torch.manual_seed(0)
    steps_s = MODEL_STEP_S
    if arguments.model_steps:
        steps_s = measure_model(str(random_checkpoint("qwen3-0.6b")), arguments.model_steps)
    cases = [case for case in CASES if not arguments.case or any(part in case.name for part in arguments.case)]
    num_blocks = (arguments.num_long * (LONG + 4096) + max(NUMS_REQUESTS) * (SHORT + 4096)) // BLOCK_SIZE
    with tempfile.TemporaryDirectory() as directory:
        word_tokenizer(Path(directory), VOCAB_SIZE)
        bench = Bench(Tokenizer.load(Path(directory)), num_blocks)
    rows = measure_arrival(bench, arguments.rounds)
    rows += measure_steps(bench, cases, arguments.num_long, arguments.rounds, steps_s)
    config = {
        "rounds": arguments.rounds, "num_long": arguments.num_long, "vocab_size": VOCAB_SIZE,
        "model_step_s": {str(count): seconds for count, seconds in steps_s.items()},
    }  # fmt: skip
    report = Report("overhead", config, rows, ["share: of the whole step, model included; floor: the whole step"])
    report.print()
    if arguments.save:
        print(f"saved {report.save().relative_to(Path.cwd())}")


if __name__ == "__main__":
    main()
