"""Speculative decoding of real text beside vLLM's n-gram drafts and llama.cpp's prompt lookup: one stream, tokens per
second of each system with drafts over its own without.

    python -m bench.draft_peers [--prompts 2] [--tokens 96] [--rounds 3] [--build DIR] [--save]

Every engine answers the prompts of `bench.speculate` without a server, one after the other in a changing order, while
the others wait. Weights are bfloat16 for all: the default model's codes, decoded. Answers are greedy. Other systems'
answers may differ from ours, and from their own without drafts, where roundings differ; `tokens as off` tells how many
of a system's tokens come before its first difference from its own answer without drafts. Environments are those of
`bench.race`, made on first use; llama.cpp is compiled then, which takes some ten minutes. An interrupt ends
the run with a report of what was measured.
"""

import argparse
import json
import random
import statistics
import subprocess
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, Protocol, cast

import gguf

from bench.dtypes import checkpoint
from bench.load import ForeignLoad, prioritise
from bench.race.peers import llama_cpp, vllm
from bench.race.peers.environment import BUILD, Environment, prepare
from bench.race.peers.process import ROOT, cores, end_of, surroundings
from bench.race.peers.scripts.speaking import READY
from bench.race.system import NotHere
from bench.report import Report, Row
from bench.speculate import OFF, WORKLOADS, Prompts, Speaker
from tandem.compute.native.build import default_cache_dir
from tandem.models.default_model import NAME, fetch_default_model

DTYPE = "bfloat16"
OURS = (OFF, "suffix", "ngram")
VLLM_DRAFTS = (0, 3, 5)
LLAMA_DRAFTS = (0, 2, 10)  # what its documents name for processors, and its default
DEFAULT_WORKLOADS = "code,summary,chat"
_SCRIPTS = "bench.race.peers.scripts"


@dataclass(frozen=True, slots=True)
class Spoken:
    """One answer. `num_timed` tokens came in `seconds`: those behind the first."""

    token_ids: tuple[int, ...]
    num_timed: int
    seconds: float


class Voice(Protocol):
    """A system with or without drafts."""

    def say(self, prompt: Sequence[int], num_tokens: int) -> Spoken: ...


class OurVoice:
    """An engine in this process."""

    def __init__(self, path: Path, drafter: str) -> None:
        self.speaker = Speaker(path, drafter)

    def say(self, prompt: Sequence[int], num_tokens: int) -> Spoken:
        run = self.speaker.run([prompt], num_tokens)
        return Spoken(tuple(run.answers[0]), round(run.tokens_per_s * run.seconds), run.seconds)


class TheirVoice:
    """A process of another environment, see `scripts.speaking`."""

    def __init__(self, process: "subprocess.Popen[str]", log: Path) -> None:
        self._process = process
        self._log = log

    def await_ready(self) -> None:
        """Raises `NotHere` with the end of what it printed."""
        if self._line() != READY:
            raise NotHere(f"it is not ready; its output ends: {end_of(self._log)}")

    def say(self, prompt: Sequence[int], num_tokens: int) -> Spoken:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompt": list(prompt), "num_output": num_tokens}) + "\n")
        self._process.stdin.flush()
        told = json.loads(self._line())
        if len(told["token_ids"]) != num_tokens:
            raise NotHere(f"{len(told['token_ids'])} tokens in place of {num_tokens}; see {self._log}")
        return Spoken(tuple(told["token_ids"]), told["num_timed"], told["seconds"])

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise NotHere(f"it has ended; its output ends: {end_of(self._log)}")
        return line.rstrip("\n")


@dataclass(frozen=True, slots=True)
class Peer:
    """A system of another environment."""

    name: str
    environment: Environment
    arguments: Sequence[str]
    variables: Mapping[str, str]

    @contextmanager
    def voice(self) -> Iterator[TheirVoice]:
        """It, started and perhaps not ready; ended afterwards."""
        log = self.environment.log(self.name.replace(" ", "-"))
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as output:
            process = subprocess.Popen(
                [str(self.environment.python), "-m", *self.arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                cwd=ROOT,
                env=surroundings(self.variables),
                text=True,
            )
        with process:
            yield TheirVoice(process, log)
            process.kill()


def peers(build: Path, path: Path, gguf_file: Path) -> list[Peer]:
    """All of them, each without drafts and with two numbers of them."""
    vllm_environment = replace(vllm.ENVIRONMENT, build=build)
    llama_environment = replace(llama_cpp.ENVIRONMENT, build=build)
    variables = vllm.variables(vllm_environment, num_threads=len(cores()))
    found = []
    for count in VLLM_DRAFTS:
        arguments = [f"{_SCRIPTS}.vllm_speaking", "--model", str(path), "--dtype", DTYPE, "--drafts", str(count)]
        name = f"vllm ngram {count}" if count else f"vllm {OFF}"
        found.append(Peer(name, vllm_environment, arguments, variables))
    for count in LLAMA_DRAFTS:
        arguments = [f"{_SCRIPTS}.llama_speaking", "--model", str(gguf_file)]
        arguments += ["--threads", str(len(cores())), "--drafts", str(count)]
        found.append(
            Peer(f"llama.cpp lookup {count}" if count else f"llama.cpp {OFF}", llama_environment, arguments, {})
        )
    return found


def decoded(source: Path, target: Path) -> Path:
    """The GGUF file with matrices in bfloat16, made first if need be."""
    if target.exists():
        return target
    reader = gguf.GGUFReader(source)
    partly = target.with_suffix(".partial")
    partly.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(partly, cast(str, reader.fields["general.architecture"].contents()))
    for name, value in reader.fields.items():
        if not name.startswith(("GGUF.", "general.architecture", "general.file_type", "general.quantization_version")):
            of_elements = value.types[-1] if len(value.types) > 1 else None
            writer.add_key_value(name, value.contents(), value.types[0], of_elements)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    kinds = gguf.GGMLQuantizationType
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        kind = kinds.F32 if values.ndim == 1 else kinds.BF16
        writer.add_tensor(tensor.name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return partly.rename(target)


def measure(
    workloads: Sequence[str], num_prompts: int, num_tokens: int, rounds: int, build: Path, only: Sequence[str] = ()
) -> Report:
    """Every system on every workload. `only`: names that peers begin with; empty = all. Raises `NotHere`."""
    path = checkpoint(DTYPE)
    source = fetch_default_model(default_cache_dir() / "models")
    chosen = peers(build, path, decoded(source, build / "llama" / f"{NAME}-bf16.gguf"))
    chosen = [peer for peer in chosen if not only or peer.name.startswith(tuple(only))]
    rows: list[Row] = []
    with ExitStack() as standing:
        for environment in {peer.environment.name: peer.environment for peer in chosen}.values():
            prepare(environment)
        theirs = {peer.name: standing.enter_context(peer.voice()) for peer in chosen}
        ours = {f"tandem {drafter}": OurVoice(path, drafter) for drafter in OURS}
        for their in theirs.values():
            their.await_ready()
        voices: dict[str, Voice] = {**ours, **theirs}
        prompts = Prompts(path, ours[f"tandem {OFF}"].speaker, num_tokens)
        order = random.Random(0)
        with suppress(KeyboardInterrupt):
            for workload in workloads:
                asked = WORKLOADS[workload](prompts)[:num_prompts]
                for voice in voices.values():  # NOTE: first answers compile, and measure how long steps take
                    voice.say(asked[0], num_tokens)
                spoken: dict[str, list[list[Spoken]]] = defaultdict(list)
                load = ForeignLoad()
                for _ in range(rounds):
                    for name in order.sample(sorted(voices), len(voices)):
                        spoken[name].append([voices[name].say(prompt, num_tokens) for prompt in asked])
                rows += rows_of(workload, spoken, load.cores())
        for own in ours.values():
            own.speaker.engine.close()
    config = {"model": NAME, "dtype": DTYPE, "prompts": num_prompts, "tokens": num_tokens, "rounds": rounds}
    return Report("draft-peers", {**config, **versions(chosen)}, rows)


def versions(chosen: Sequence[Peer]) -> dict[str, Any]:
    """Package versions of the peers, and how many matching tokens each engine needs before it drafts."""
    found = {peer.environment.name: peer.environment.packages[0] for peer in chosen}
    return {"peers": found, "lookup": "up to 8 tokens; from 2 on for vLLM and Tandem, from 1 on for llama.cpp"}


def rows_of(workload: str, spoken: Mapping[str, Sequence[Sequence[Spoken]]], foreign_cores: float) -> list[Row]:
    """Speeds, and ratios to the system's own turn without drafts in the same round."""
    rows = []
    for name, turns in spoken.items():
        base = spoken[f"{name.split()[0]} {OFF}"]
        figures = {"decoded tokens/s": ("tok/s", tuple(map(_rate, turns)))}
        if turns is not base:
            figures["over off"] = ("x", tuple(_rate(on) / _rate(off) for on, off in zip(turns, base, strict=True)))
            figures["tokens as off"] = ("share", tuple(map(_share_equal, turns, base)))
        make = partial(Row, workload, name, samples=(), foreign_cores=foreign_cores)
        for metric, (unit, samples) in figures.items():
            rows.append(replace(make(metric, statistics.median(samples), unit), samples=samples))
    return rows


def _rate(answers: Sequence[Spoken]) -> float:
    return sum(answer.num_timed for answer in answers) / sum(answer.seconds for answer in answers)


def _share_equal(turn: Sequence[Spoken], base: Sequence[Spoken]) -> float:
    """Of tokens before the first difference."""
    num_equal = 0
    for one, other in zip(turn, base, strict=True):
        pairs = zip(one.token_ids, other.token_ids, strict=True)
        num_equal += sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return num_equal / sum(len(answer.token_ids) for answer in base)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default=DEFAULT_WORKLOADS)
    parser.add_argument("--only", default="", help="what the names of peers begin with, such as vllm; omitted: all")
    parser.add_argument("--prompts", type=int, default=2, help="of each workload, at most 4")
    parser.add_argument("--tokens", type=int, default=96, help="of each answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--build", type=Path, default=BUILD, help="where the peers' environments go")
    parser.add_argument("--save", action="store_true", help="keep the JSON under bench/results")
    arguments = parser.parse_args()
    workloads = arguments.workloads.split(",")
    if not set(workloads) <= set(WORKLOADS):
        parser.error(f"--workloads {arguments.workloads}: name some of {', '.join(WORKLOADS)}")
    if arguments.tokens < 2:
        parser.error(f"--tokens {arguments.tokens}: at least 2, since the first is not timed")
    prioritise()
    only = [name for name in arguments.only.split(",") if name]
    report = measure(workloads, arguments.prompts, arguments.tokens, arguments.rounds, arguments.build.absolute(), only)
    report.print()
    if arguments.save:
        print(f"saved {report.save().relative_to(Path.cwd())}")


if __name__ == "__main__":
    main()
