"""The race of coded weights: Tandem, OpenVINO and llama.cpp with 8 and with 4 bits a weight.

Peers are compared with those of ours that have as many bits. Each quantises the same checkpoint by its own tool, to
the nearest. Tandem serves llama.cpp's files too. "a8": with `--activations int8`. llama.cpp always rounds activations
to 8 bits, and OpenVINO does with coded weights unless it is told otherwise.
"""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.race.ours import Tandem
from bench.race.peers.llama_cpp import LlamaCpp
from bench.race.peers.openvino import OpenVino
from bench.race.shapes import group_size
from bench.race.system import NotHere, System

ACTIVATIONS = ("--activations", "int8")


@dataclass(frozen=True, slots=True)
class QuantizedBy:
    """Weights that `tandem quantize` writes to the nearest; `name` of its formats."""

    name: str
    build: Path

    def __call__(self, checkpoint: Path) -> Path:
        target = self.build / "quantized" / f"{checkpoint.name}-{self.name}"
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            done = subprocess.run(self.command(checkpoint, target), capture_output=True, text=True, check=False)
            if done.returncode:
                raise NotHere(f"tandem quantize: {done.stderr[-500:]}")
        return target

    def command(self, checkpoint: Path, target: Path) -> list[str]:
        """NOTE: measures quality on one short sequence only: the race has a table of its own."""
        command = [sys.executable, "-m", "tandem.cli.main", "quantize", "--model", str(checkpoint)]
        command += ["--format", self.name, "--method", "rtn", "--out", str(target)]
        command += ["--evaluation-sequences", "1", "--sequence-length", "64"]
        return command + (["--group-size", str(group_size(checkpoint))] if self.name == "int4" else [])


@dataclass(frozen=True, slots=True)
class FileOf:
    """The file that llama.cpp codes."""

    peer: LlamaCpp

    def __call__(self, checkpoint: Path) -> Path:
        return self.peer.coded(checkpoint)


def entrants(build: Path, dtype: str, flags: Sequence[str] = ()) -> list[System]:
    """Ours first. Their names tell the bits of a weight (`bench.race.summary.bits_of`).

    `dtype`: of OpenVINO's other products. `flags`: more for `tandem up`.
    """
    build = build.absolute()
    logs = build / "logs"
    llama = {name: LlamaCpp(name, build) for name in ("Q8_0", "Q4_0", "Q4_K_M")}

    def ours(name: str, weights: QuantizedBy | FileOf) -> list[System]:
        plain = Tandem(f"tandem-{name}", 0, logs, tuple(flags), weights)
        return [plain, Tandem(f"tandem-{name}-a8", 0, logs, (*flags, *ACTIVATIONS), weights)]

    def openvino(name: str) -> System:
        return OpenVino(f"openvino-{name}", build, dtype, weight_format=name)

    return [
        *(*ours("int8", QuantizedBy("int8", build)), *ours("q8_0", FileOf(llama["Q8_0"]))),
        *(*ours("int4", QuantizedBy("int4", build)), *ours("mxfp4", QuantizedBy("mxfp4", build))),
        *(*ours("q4_0", FileOf(llama["Q4_0"])), *ours("q4_k_m", FileOf(llama["Q4_K_M"]))),
        *(openvino("int8"), openvino("int4"), *llama.values()),
    ]
