"""OpenVINO GenAI: the checkpoint exported once, then its continuous batching behind a light server of ours."""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from bench.race.peers.environment import BUILD, Environment, prepare, run
from bench.race.peers.process import HOST, Program, answers, cores, ports, running
from bench.race.shapes import group_size
from bench.race.system import KV_CACHE_GIB, Served

MODEL = "m"
ENVIRONMENT = Environment(
    "openvino",
    (
        "torch==2.13.0",
        "openvino==2026.4.1",
        "openvino-genai==2026.4.1.0",
        "openvino-tokenizers==2026.4.1.0",
        "optimum-intel==2.2.0",
        "nncf==3.4.0",
        "transformers==5.5.4",
    ),
    unwanted=("torchvision",),
)


@dataclass(frozen=True, slots=True)
class OpenVino:
    """`ContinuousBatchingPipeline`; see scripts/openvino_server.py for what it is told.

    `kv_precision`: of keys and values. 8 bits are its own default on the CPU, and prompts were slower with 16 in every
    trial, so it races with those although no other system rounds so much. `weight_format`: as its exporter names them.
    """

    name: str = "openvino"
    build: Path = BUILD
    dtype: str = "bfloat16"
    kv_precision: str = "u8"
    weight_format: str = "fp16"

    @property
    def environment(self) -> Environment:
        return replace(ENVIRONMENT, build=self.build)

    @property
    def is_int4(self) -> bool:
        return self.weight_format == "int4"

    def prepare(self) -> None:
        prepare(self.environment)

    @contextmanager
    def serve(self, checkpoint: Path) -> Iterator[Served]:
        model, (port,) = self.exported(checkpoint), ports(1)
        program = Program(
            self.name, self.command(model, port), self.environment.log(self.name), f"http://{HOST}:{port}/health"
        )
        with running(program) as pids:
            ready, num_bytes = partial(answers, program.ready_url), None
            if self.weight_format != "fp16":
                num_bytes = (model / "openvino_model.bin").stat().st_size
            yield Served(f"http://{HOST}:{port}", MODEL, pids, is_ready=ready, weight_bytes=num_bytes)

    def body(self, prompt: Sequence[int], num_output: int) -> dict[str, object]:
        """Nothing: the server knows no other kind of request."""
        return {}

    def command(self, model: Path, port: int) -> list[str]:
        return [
            str(self.environment.python),
            *("-m", "bench.race.peers.scripts.openvino_server"),
            *("--model", str(model)),
            *("--name", MODEL),
            *("--port", str(port)),
            *("--threads", str(len(cores()))),
            *("--cache-gb", str(KV_CACHE_GIB)),
            *("--precision", "bf16" if self.dtype == "bfloat16" else "f32"),
            *("--kv-precision", self.kv_precision),
        ]

    def exported(self, checkpoint: Path) -> Path:
        """The checkpoint as OpenVINO reads it, made on first use. Raises NotHere."""
        coded = "" if self.weight_format == "fp16" else f"-{self.weight_format}"
        model = self.build / "openvino" / f"{checkpoint.name}{coded}"
        mark = model / "complete"
        if not mark.exists():
            shutil.rmtree(model, ignore_errors=True)
            failure = f"openvino cannot export {checkpoint.name}"
            run(self.export_command(checkpoint, model), failure, self.environment.log("openvino-export"))
            mark.touch()
        return model

    def export_command(self, checkpoint: Path, model: Path) -> list[str]:
        return [
            str(self.environment.directory / "bin" / "optimum-cli"),
            *("export", "openvino"),
            *("--model", str(checkpoint)),
            *("--task", "text-generation-with-past"),
            *("--weight-format", self.weight_format),
            *(("--group-size", str(group_size(checkpoint)), "--ratio", "1.0", "--sym") if self.is_int4 else ()),
            str(model),
        ]
