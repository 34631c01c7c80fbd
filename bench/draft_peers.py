"""Speculative decoding of real text beside vLLM's n-gram drafts and llama.cpp's look-up and draft decoding: one stream,
tokens per second of each system with drafts over its own without.

    python -m bench.draft_peers [--prompts 2] [--tokens 96] [--rounds 3] [--build DIR] [--save]

Every engine answers the prompts of `bench.speculate`, one after the other in a changing order, while the others wait.
Weights are bfloat16 for all: the default model's codes, decoded. The draft model, ours and llama.cpp's, is that model
with its own 4-bit codes. llama.cpp is asked as a server, since only that has its draft decoding; others are asked
without one. Answers are greedy. Other systems' answers may differ from ours, and from their own without drafts, where
roundings differ; `tokens as off` tells how many of a system's tokens come before its first difference from its own
answer without drafts. Environments are made on first use; llama.cpp is compiled then, which takes some ten minutes. An
interrupt ends the run with a report of what was measured.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Protocol, cast

import gguf

from bench.dtypes import checkpoint
from bench.load import ForeignLoad, prioritise
from bench.race.peers import llama_native, vllm
from bench.race.peers.environment import BUILD, prepare
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
LLAMA_LOOKUPS = ("ngram-simple", "ngram-cache")  # with its own lengths; the second is its `lookup` example's
LLAMA_DRAFTS = (3, 7)  # its default, and the most of ours
VERSIONS = {
    "peers": [vllm.ENVIRONMENT.packages[0], f"llama.cpp of {llama_native.PACKAGE}"],
    "lookup": "up to 8 tokens that match, from 2 on, for vLLM and Tandem; as its defaults for llama.cpp",
    "draft model": f"{NAME} with 4-bit codes (Q4_1)",
}
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
    """Another system. `prepare` makes what it needs; raises `NotHere`."""

    name: str
    build: Path
    command: Sequence[str]
    variables: Mapping[str, str]
    prepare: Callable[[], object]

    @contextmanager
    def voice(self) -> Iterator[TheirVoice]:
        """It, started and perhaps not ready; ended afterwards, with what it started."""
        log = self.build / "logs" / f"{self.name.replace(' ', '-')}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as output:
            process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                cwd=ROOT,
                env=surroundings(self.variables),
                text=True,
                start_new_session=True,
            )
        with process:
            try:
                yield TheirVoice(process, log)
            finally:
                os.killpg(process.pid, signal.SIGKILL)


def peers(build: Path, path: Path, gguf_file: Path, drafting: Path) -> list[Peer]:
    """All of them, each without drafts and with several kinds or numbers of them.

    Args:
        path: the checkpoint's directory.
        gguf_file: the same weights in llama.cpp's format.
        drafting: the draft model's GGUF file.
    """
    environment = replace(vllm.ENVIRONMENT, build=build)
    variables = vllm.variables(environment, num_threads=len(cores()))
    make = partial(Peer, build=build, variables=variables, prepare=partial(prepare, environment))
    found = []
    for count in VLLM_DRAFTS:
        command = [str(environment.python), "-m", f"{_SCRIPTS}.vllm_speaking", "--model", str(path), "--dtype", DTYPE]
        name = f"vllm ngram {count}" if count else f"vllm {OFF}"
        found.append(make(name, command=[*command, "--drafts", str(count)]))
    make = partial(Peer, build=build, variables={}, prepare=partial(llama_native.llama_server, build))
    speaking = [sys.executable, "-m", f"{_SCRIPTS}.llama_speaking", "--program", str(llama_native.program(build))]
    speaking += ["--model", str(gguf_file), "--threads", str(len(cores())), "--"]
    found.append(make(f"llama.cpp {OFF}", command=speaking))
    for kind in LLAMA_LOOKUPS:
        found.append(make(f"llama.cpp {kind}", command=[*speaking, "--spec-type", kind]))
    for count in LLAMA_DRAFTS:
        drafts = ["--spec-type", "draft-simple", "--model-draft", str(drafting), "--spec-draft-n-max", str(count)]
        found.append(make(f"llama.cpp draft {count}", command=[*speaking, *drafts]))
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
    chosen = peers(build, path, decoded(source, build / "llama" / f"{NAME}-bf16.gguf"), source)
    chosen = [peer for peer in chosen if not only or peer.name.startswith(tuple(only))]
    rows: list[Row] = []
    with ExitStack() as standing:
        for peer in chosen:
            peer.prepare()
        theirs = {peer.name: standing.enter_context(peer.voice()) for peer in chosen}
        ours = {f"tandem {drafter}": OurVoice(path, drafter) for drafter in OURS}
        ours["tandem draft"] = OurVoice(path, f"draft={source}")
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
    return Report("draft-peers", {**config, **VERSIONS}, rows)


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
