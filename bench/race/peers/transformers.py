"""transformers: its continuous batching behind a light server of ours.

Its own `transformers serve` takes texts only, so a prompt of token ids cannot be asked of it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from bench.race.peers.environment import BUILD, Environment, prepare
from bench.race.peers.process import HOST, Program, answers, cores, ports, running
from bench.race.system import KV_CACHE_GIB, Served

MODEL = "m"
ENVIRONMENT = Environment("transformers", ("torch==2.13.0", "transformers==5.23.0", "psutil==7.2.2"))


@dataclass(frozen=True, slots=True)
class Transformers:
    """`ContinuousBatchingManager`; see scripts/transformers_server.py for what it is told."""

    name: str = "transformers"
    build: Path = BUILD
    dtype: str = "bfloat16"

    @property
    def environment(self) -> Environment:
        return replace(ENVIRONMENT, build=self.build)

    def prepare(self) -> None:
        prepare(self.environment)

    @contextmanager
    def serve(self, checkpoint: Path) -> Iterator[Served]:
        (port,) = ports(1)
        program = Program(
            self.name, self.command(checkpoint, port), self.environment.log(self.name), f"http://{HOST}:{port}/health"
        )
        with running(program) as pids:
            yield Served(f"http://{HOST}:{port}", MODEL, pids, is_ready=partial(answers, program.ready_url))

    def body(self, prompt: Sequence[int], num_output: int) -> dict[str, object]:
        """Nothing: the server knows no other kind of request."""
        return {}

    def command(self, model: Path, port: int) -> list[str]:
        return [
            str(self.environment.python),
            *("-m", "bench.race.peers.scripts.transformers_server"),
            *("--model", str(model)),
            *("--name", MODEL),
            *("--port", str(port)),
            *("--threads", str(len(cores()))),
            *("--cache-gb", str(KV_CACHE_GIB)),
            *("--dtype", self.dtype),
        ]
