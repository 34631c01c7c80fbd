"""Cost of grammars in a step: batches of free and of constrained rows take turns on one engine.

The vocabulary is as wide as Qwen3's and made of random words, since no tokenizer of that size comes with us. Rows
are decoding all the time: grammars that go on for longer than the run. `mask wait` is what a step spent waiting for its
masks after the model was done; the rest of the difference is laying them over the logits.
"""

import argparse
import dataclasses
import json
import random
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from bench.checkpoints import SHAPES, random_checkpoint
from bench.load import ForeignLoad, prioritise
from bench.report import Report, Row
from tandem.core.config import EngineConfig
from tandem.core.sampling_params import SamplingParams
from tandem.engine.resolve import Assembly, assemble
from tandem.text.grammar import regex_grammar, schema_grammar

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "email": {"type": "string", "format": "email"},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["new", "paying", "former"]}, "maxItems": 4},
    },
    "required": ["name", "email", "age", "tags"],
    "additionalProperties": False,
}
GRAMMARS: dict[str, str | None] = {
    "free": None,
    "any JSON": schema_grammar({"type": "array", "minItems": 1000}),
    "schema": schema_grammar({"type": "array", "items": PERSON, "minItems": 1000}),
    "regex": regex_grammar(r"([a-z]{1,12}[ ,]){1000}"),
}
NUM_PROMPT_TOKENS = 64
WARM_UP_STEPS = 4


@dataclasses.dataclass(frozen=True)
class Run:
    """Of one batch: seconds of each whole decode step, and seconds a step waited for masks on average."""

    steps_s: list[float]
    wait_s: float


def word_tokenizer(path: Path, vocab_size: int) -> None:
    """A byte-level tokenizer of random words, no two alike; the last token is its end."""
    rng = random.Random(0)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: index for index, symbol in enumerate(alphabet)}
    marks = [*'{}[]",:', "Ġ", "Ċ"]
    while len(vocab) < vocab_size - 1:
        word = "".join(rng.choices("etaoinshrdlucmfwypvbgkjqxz", k=rng.choice([2, 3, 4, 5, 6, 8])))
        kind = rng.random()
        token = f"Ġ{word}" if kind < 0.4 else "".join(rng.choices(marks, k=3)) if kind < 0.45 else word
        token = str(rng.randrange(10000)) if kind > 0.97 else token
        vocab.setdefault(token, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))


def checkpoint(shape: str, directory: Path) -> Path:
    """The weights of `random_checkpoint` beside a tokenizer as wide as they are."""
    source = random_checkpoint(shape)
    for file in source.iterdir():
        if not file.name.startswith("tokenizer"):
            (directory / file.name).symlink_to(file)
    word_tokenizer(directory, SHAPES[shape]["vocab_size"])
    return directory


def run(assembly: Assembly, grammar: str | None, num_rows: int, num_steps: int, seed: int) -> Run:
    """Decode `num_rows` rows together."""
    engine, masks = assembly.engine, assembly.masks
    rng = random.Random(seed)
    for index in range(num_rows):
        params = SamplingParams(
            grammar=grammar, max_tokens=num_steps + WARM_UP_STEPS + 4, seed=index, ignore_eos=grammar is None, top_k=50
        )
        engine.add_request([rng.randrange(256) for _ in range(NUM_PROMPT_TOKENS)], params)
    steps_s: list[float] = []
    engine.take_step_stats()
    while engine.has_work and len(steps_s) < num_steps + WARM_UP_STEPS:
        if len(steps_s) == WARM_UP_STEPS:
            waited_s = masks.waited_s
        engine.step()
        steps_s += [stats.duration_s for stats in engine.take_step_stats() if stats.num_decodes == num_rows]
    wait_s = (masks.waited_s - waited_s) / num_steps
    while engine.has_work:
        engine.step()
    return Run(steps_s[WARM_UP_STEPS:], wait_s)


def measure(shape: str, num_rows: int, num_steps: int, rounds: int) -> Report:
    steps: dict[str, list[float]] = defaultdict(list)
    waits: dict[str, list[float]] = defaultdict(list)
    foreign: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as directory:
        config = EngineConfig(
            model=str(checkpoint(shape, Path(directory))),
            max_model_len=1024,
            max_num_batched_tokens=max(512, num_rows * NUM_PROMPT_TOKENS),
            max_num_running=num_rows,
        )
        assembly = assemble(config)
        for index in range(rounds):
            for name, grammar in GRAMMARS.items():
                load = ForeignLoad()
                found = run(assembly, grammar, num_rows, num_steps, index)
                foreign[name].append(load.cores())
                steps[name].append(statistics.median(found.steps_s))
                waits[name].append(found.wait_s)
                print(f"round {index} · {name}: {statistics.median(found.steps_s) * 1e3:.1f} ms", flush=True)
        assembly.engine.close()
    settings = {"shape": shape, "num_rows": num_rows, "num_steps": num_steps, "rounds": rounds}
    return Report("constraints", settings, list(_rows(steps, waits, foreign, num_rows)))


def _rows(
    steps: dict[str, list[float]], waits: dict[str, list[float]], foreign: dict[str, list[float]], num_rows: int
) -> Iterator[Row]:
    """`floor`: the step of rows that nothing constrains; `share`: of that step, for a wait."""
    free_s = statistics.median(steps["free"])
    for name, samples in steps.items():
        step_s, cores = statistics.median(samples), statistics.median(foreign[name])
        system, workload = "tandem", f"{name} x{num_rows}"
        yield Row(workload, system, "step", step_s * 1e3, "ms", free_s * 1e3, free_s / step_s, tuple(samples), cores)
        if name != "free":
            wait_s = statistics.median(waits[name])
            share = wait_s / step_s
            yield Row(workload, system, "mask wait", wait_s * 1e3, "ms", None, share, tuple(waits[name]), cores)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--num-rows", type=int, default=32)
    parser.add_argument("--num-steps", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", action="store_true", help="keep the JSON under bench/results")
    arguments = parser.parse_args()
    prioritise()
    report = measure(arguments.shape, arguments.num_rows, arguments.num_steps, arguments.rounds)
    report.print()
    if arguments.save:
        print(f"saved {report.save().relative_to(Path.cwd())}")


if __name__ == "__main__":
    main()
