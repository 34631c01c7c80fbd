"""Batched serving beside `transformers` continuous batching: the same prompts, lengths and shapes of weights.

Each system has the device to itself. `transformers` warms up on a whole workload of its own before it is measured.
"""

import inspect
import random
import time
from collections.abc import Callable
from typing import Any

import torch

from bench.gpu.models import fields_of, random_model
from bench.gpu.results import SectionResults
from bench.gpu.setting import Setting
from bench.gpu.stack import Limits, build, serve
from bench.report import Row

NUM_REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 64, 512, 128
ROUNDS = 3
SLOW_WARM_UP_S = 90.0

Prompts = list[list[int]]


def run_tandem(setting: Setting, results: SectionResults, name: str) -> None:
    """Our engine."""
    num_prompt, num_output = sizes(setting)
    model = random_model(setting, name, num_prompt + num_output)
    limits = Limits(num_prompt + num_output, num_requests(setting), setting.pick(8192, 64))
    stack = build(setting, model, limits)

    def pass_over(prompts: Prompts) -> float:
        started_s = time.perf_counter()
        serve(stack, prompts, num_output, len(prompts))
        return time.perf_counter() - started_s

    pass_over(prompts_of(setting, name, -1))
    _rounds(setting, results, name, stack.system, pass_over)


def run_transformers(setting: Setting, results: SectionResults, name: str) -> None:
    """`generate_batch`, with whatever attention it chooses here."""
    model = _transformers_model(setting, name)
    generate = _batch_generator(setting, model)
    warm_up_s = generate(prompts_of(setting, name, -1))
    system = f"transformers continuous batching, {model.config._attn_implementation}"
    if warm_up_s > SLOW_WARM_UP_S:
        results.note(f"{system}: the one pass took {warm_up_s:.0f} s, warm-up included; it was not repeated")
        _row(setting, results, name, system, [warm_up_s])
        return
    _rounds(setting, results, name, system, generate)


def sizes(setting: Setting) -> tuple[int, int]:
    """Tokens of a prompt, tokens of an answer."""
    return setting.pick(PROMPT_TOKENS, 24), setting.pick(OUTPUT_TOKENS, 6)


def num_requests(setting: Setting) -> int:
    return setting.pick(NUM_REQUESTS, 4)


def prompts_of(setting: Setting, name: str, seed: int) -> Prompts:
    """Prompts that share no beginning."""
    rng, vocab_size = random.Random(seed), fields_of(name, is_dry=setting.is_dry)["vocab_size"]
    return [[rng.randrange(5, vocab_size) for _ in range(sizes(setting)[0])] for _ in range(num_requests(setting))]


def _rounds(
    setting: Setting, results: SectionResults, name: str, system: str, pass_over: Callable[[Prompts], float]
) -> None:
    seconds = [pass_over(prompts_of(setting, name, seed)) for seed in range(ROUNDS)]
    _row(setting, results, name, system, seconds)


def _row(setting: Setting, results: SectionResults, name: str, system: str, seconds: list[float]) -> None:
    (num_prompt, num_output), count = sizes(setting), num_requests(setting)
    rates = sorted(count * num_output / sample for sample in seconds)
    workload = f"{name} batched {count} x {num_prompt}/{num_output}"
    results.row(Row(workload, system, "output tokens/s", rates[len(rates) // 2], "tok/s", samples=tuple(rates)))


def _transformers_model(setting: Setting, name: str) -> Any:
    import transformers

    fields = {key: value for key, value in fields_of(name, is_dry=setting.is_dry).items() if key != "architectures"}
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    with torch.device(setting.device):
        made: Any = transformers.AutoModelForCausalLM
        return made.from_config(config, dtype=torch.bfloat16).eval()


def _batch_generator(setting: Setting, model: Any) -> Callable[[Prompts], float]:
    """Serves prompts and tells the seconds. The manager is kept, so that only the first call sets it up."""
    import transformers

    num_output = sizes(setting)[1]
    make: Any = transformers.GenerationConfig
    config = make(max_new_tokens=num_output, do_sample=False, eos_token_id=-1, pad_token_id=0)
    options: dict[str, Any] = {"generation_config": config, "progress_bar": False, "persistent_manager": True}
    if setting.is_dry:  # NOTE: left alone it takes most of a machine's memory
        generation: Any = transformers.generation
        limits = generation.ContinuousBatchingConfig
        options["continuous_batching_config"] = limits(num_blocks=8, max_batch_tokens=64)
    accepted = inspect.signature(model.generate_batch).parameters
    options = {key: value for key, value in options.items() if key in accepted}

    def generate(prompts: Prompts) -> float:
        started_s = time.perf_counter()
        outputs = model.generate_batch(inputs=prompts, **options)
        elapsed_s = time.perf_counter() - started_s
        lengths = [len(output.generated_tokens) for output in outputs.values()]
        if lengths != [num_output] * len(prompts):
            raise RuntimeError(
                f"generate_batch answered {len(prompts)} prompts with {lengths} tokens: {outputs!r:.500}"
            )
        return elapsed_s

    return generate
