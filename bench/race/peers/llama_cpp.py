"""llama.cpp: the checkpoint written as a GGUF file, coded by its own quantiser, behind a light server of ours.

The library is that of `llama-cpp-python`, compiled for this processor when it is installed (some ten minutes).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from bench.race.peers.environment import BUILD, Environment, prepare, run
from bench.race.peers.gguf_file import write_gguf
from bench.race.peers.process import HOST, Program, answers, cores, ports, running
from bench.race.system import Served

MODEL = "m"
ENVIRONMENT = Environment("llama", ("llama-cpp-python==0.3.36", "tokenizers==0.22.1"), constraints=())
_SCRIPTS = "bench.race.peers.scripts"


@dataclass(frozen=True, slots=True)
class LlamaCpp:
    """`type_name`: of weights, as llama.cpp names its mixtures of types. Keys and values have 16 bits, its default."""

    type_name: str
    build: Path = BUILD

    @property
    def name(self) -> str:
        return f"llama-{self.type_name.lower()}"

    @property
    def environment(self) -> Environment:
        return replace(ENVIRONMENT, build=self.build)

    def prepare(self) -> None:
        prepare(self.environment)

    @contextmanager
    def serve(self, checkpoint: Path) -> Iterator[Served]:
        file, (port,) = self.coded(checkpoint), ports(1)
        program = Program(
            self.name,
            self.command(file, checkpoint, port),
            self.environment.log(self.name),
            f"http://{HOST}:{port}/health",
        )
        with running(program) as pids:
            ready = partial(answers, program.ready_url)
            yield Served(f"http://{HOST}:{port}", MODEL, pids, is_ready=ready, weight_bytes=file.stat().st_size)

    def body(self, prompt: Sequence[int], num_output: int) -> dict[str, object]:
        """Nothing: the server knows no other kind of request."""
        return {}

    def command(self, file: Path, checkpoint: Path, port: int) -> list[str]:
        return [
            *(str(self.environment.python), "-m", f"{_SCRIPTS}.llama_server", "--model", str(file)),
            *("--tokenizer", str(checkpoint / "tokenizer.json"), "--name", MODEL),
            *("--port", str(port), "--threads", str(len(cores()))),
        ]

    def coded(self, checkpoint: Path) -> Path:
        """The checkpoint as a file of this type, made on first use. Raises NotHere."""
        directory = self.build / "llama"
        file = directory / f"{checkpoint.name}-{self.type_name.lower()}.gguf"
        if file.exists():
            return file
        directory.mkdir(parents=True, exist_ok=True)
        source, partly = directory / f"{checkpoint.name}.gguf", file.with_suffix(".partial")
        if not source.exists():
            write_gguf(checkpoint, source)
        run(
            self.quantize_command(source, partly),
            f"llama.cpp cannot code {checkpoint.name}",
            self.environment.log("llama-quantize"),
        )
        partly.rename(file)
        return file

    def quantize_command(self, source: Path, target: Path) -> list[str]:
        return [
            *(str(self.environment.python), "-m", f"{_SCRIPTS}.llama_quantize"),
            *(str(source), str(target), self.type_name),
        ]
