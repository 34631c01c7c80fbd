"""The default model's GGUF file (Q4_1, its embedding Q8_0) as codes and in bfloat16: speed, memory, loading.

Speed: both engines in one process, in turns. Loading: a process each, first without a packed file and then with it; its
memory is what it has for its own (`RssAnon`) and at its peak (`VmHWM`) beyond what it had before.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import torch

from bench.dtypes import checkpoint
from bench.engine import Timing, Workload, run_tandem
from bench.experts import Figure, summary
from bench.load import ForeignLoad, prioritise
from bench.report import Report, Row
from tandem.compute.choose import choose_kernels
from tandem.core.config import EngineConfig
from tandem.engine.resolve import build_engine
from tandem.models.loader import load_model

WORKLOADS = (
    Workload("single 64/64", 1, 0, 64, 64, 1),
    Workload("prefill 1x1024", 1, 0, 1024, 1, 1),
    Workload("batch 16x64/32 c16", 16, 0, 64, 32, 16),
)
SYSTEMS = {"codes": None, "bfloat16": "bfloat16"}
KV_BYTES = 256 << 20
_MIB = 1 << 20


def measure(rounds: int) -> Report:
    paths = {name: checkpoint(dtype) for name, dtype in SYSTEMS.items()}
    rows = [row for name, path in paths.items() for row in _loading(name, path)]
    config = EngineConfig(
        model="", dtype="bfloat16", max_model_len=2048, max_num_batched_tokens=512, kv_cache_bytes=KV_BYTES
    )
    engines = {name: build_engine(replace(config, model=str(path))) for name, path in paths.items()}
    for engine in engines.values():
        run_tandem(engine, WORKLOADS[0], -1)
    found: dict[tuple[str, str], list[tuple[float, list[Figure]]]] = defaultdict(list)
    for index in range(rounds):
        for workload in WORKLOADS:
            for name, engine in engines.items():
                load = ForeignLoad()
                timing = run_tandem(engine, workload, index)
                found[workload.name, name].append((load.cores(), [_figure(workload, timing)]))
                print(f"round {index} · {workload.name} · {name}: {timing.wall_s:.2f} s", flush=True)
    rows += [row for (workload, name), runs in found.items() for row in summary(workload, name, runs)]
    return Report("gguf-codes", {"model": "SmolLM2-135M-Instruct.Q4_1.gguf", "rounds": rounds}, rows)


def _figure(workload: Workload, timing: Timing) -> Figure:
    if workload.is_prefill:
        return "prompt tokens/s", "tok/s", timing.num_prompt_tokens / timing.wall_s, None
    if workload.num_requests > 1:
        return "output tokens/s", "tok/s", timing.num_output_tokens / timing.wall_s, None
    assert timing.tpot_s is not None
    return "time of a token", "ms", 1e3 * timing.tpot_s, None


def _loading(name: str, path: Path) -> list[Row]:
    rows = []
    with tempfile.TemporaryDirectory() as packed_dir:
        for state in ("first", "again"):
            command = [sys.executable, "-m", "bench.gguf_codes", "--load", str(path), packed_dir]
            report = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            rows += [Row(f"load, {state}", name, metric, value, unit) for metric, (value, unit) in report.items()]
        size = sum(file.stat().st_size for file in Path(packed_dir).glob("*.safetensors"))
        rows.append(Row("disk", name, "packed file", size / _MIB, "MiB"))
    return rows


def _load(path: str, packed_dir: str) -> dict[str, tuple[float, str]]:
    """In this process: seconds, and memory in MiB."""
    cpu, dtype = torch.device("cpu"), "bfloat16"
    kernels = choose_kernels(cpu, True)
    before, began_s = _memory(), time.perf_counter()
    model = load_model(path, dtype=dtype, device=cpu, kernels=kernels, packed_dir=Path(packed_dir))
    took_s, after = time.perf_counter() - began_s, _memory()
    weights = {id(weight): weight.num_bytes for weight in model.decoder.parameters.weights.values()}
    tensors = sum(tensor.nbytes for tensor in model.decoder.parameters.tensors.values())
    return {
        "time": (took_s, "s"),
        "weights": ((sum(weights.values()) + tensors) / _MIB, "MiB"),
        "own memory": (after["RssAnon"] - before["RssAnon"], "MiB"),
        "peak": (after["VmHWM"] - before["VmRSS"], "MiB"),
    }


def _memory() -> dict[str, float]:
    """MiB of this process, by the kernel's names."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {
        name.rstrip(":"): int(rest[0]) / 1024 for name, *rest in lines if name.startswith(("Rss", "VmHWM", "VmRSS"))
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--load", nargs=2, metavar=("PATH", "PACKED_DIR"), help="load it here and say what that took")
    parser.add_argument("--save", action="store_true", help="keep the JSON under bench/results")
    arguments = parser.parse_args()
    if arguments.load:
        print(json.dumps(_load(*arguments.load)))
        return
    prioritise()
    report = measure(arguments.rounds)
    report.print()
    if arguments.save:
        print(f"saved {report.save().relative_to(Path.cwd())}")


if __name__ == "__main__":
    main()
