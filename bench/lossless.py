"""Lossless checkpoints beside plain safetensors: bytes, and time and memory of loading with the compiled kernels.

Loading: a process each, in turns, with files in the page cache; first without a packed file, as where none can be
kept, then with one that is there already.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import torch

from bench.checkpoints import random_checkpoint
from bench.dtypes import checkpoint
from bench.load import ForeignLoad, prioritise
from bench.report import Report, Row
from tandem.compute.choose import choose_kernels
from tandem.models.checkpoint import open_checkpoint
from tandem.models.convert import convert
from tandem.models.loader import load_model

_MODELS: dict[str, Callable[[], Path]] = {
    "SmolLM2-135M": lambda: checkpoint("bfloat16"),
    "random, 98M": lambda: random_checkpoint("small"),
}
_STATES = ("no packed file", "packed file is there")


def measure(rounds: int, models: Sequence[str]) -> Report:
    rows = []
    for name in models:
        with tempfile.TemporaryDirectory() as scratch:
            rows += _rows(name, _MODELS[name](), Path(scratch), rounds)
    return Report("lossless", {"rounds": rounds, "threads": torch.get_num_threads()}, rows)


def _rows(name: str, plain: Path, scratch: Path, rounds: int) -> list[Row]:
    began_s = time.perf_counter()
    done = convert(open_checkpoint(plain), scratch / "coded", lossless=True)
    took_s = time.perf_counter() - began_s
    rows = [
        Row(name, "plain", "bytes of weights", done.bytes_before / 1e6, "MB"),
        Row(name, "lossless", "bytes of weights", done.bytes_after / 1e6, "MB"),
        Row(name, "lossless", "ratio", done.bytes_after / done.bytes_before, ""),
        Row(name, "lossless", "converting", done.bytes_before / 1e6 / took_s, "MB/s"),
    ]
    systems = {"plain": plain, "lossless": scratch / "coded"}
    found: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    load = ForeignLoad()
    fingerprints = set()
    for index in range(rounds + 1):  # the first makes packed files and fills the page cache
        for system, path in systems.items():
            for state in _STATES:
                packed_dir = "" if state == _STATES[0] else str(scratch / f"packed-{system}")
                command = [sys.executable, "-m", "bench.lossless", "--load", str(path), packed_dir]
                result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
                fingerprints.add(result.pop("fingerprint"))
                for metric, value in result.items():
                    if index:
                        found[system, state, metric].append(value)
        print(f"{name}: round {index}", flush=True)
    assert len(fingerprints) == 1, "the same weights"
    cores = load.cores()
    rows += [
        Row(f"{name}, {state}", system, metric, median(values), _unit(metric), None, None, tuple(values), cores)
        for (system, state, metric), values in found.items()
    ]
    return rows


def _unit(metric: str) -> str:
    return "MB" if metric == "peak" else "s"


def _load(path: str, packed_dir: str) -> dict[str, float | str]:
    """In this process: seconds, seconds of cores, and the growth of the peak of memory in MB."""
    cpu = torch.device("cpu")
    kernels = choose_kernels(cpu, True)
    before, began_s, began_cpu_s = _memory("VmRSS"), time.perf_counter(), time.process_time()
    model = load_model(path, device=cpu, kernels=kernels, packed_dir=Path(packed_dir) if packed_dir else None)
    return {
        "time": time.perf_counter() - began_s,
        "time of cores": time.process_time() - began_cpu_s,
        "peak": _memory("VmHWM") - before,
        "fingerprint": model.spec.fingerprint,
    }


def _memory(name: str) -> float:
    """MB of this process, by the kernel's name."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024 / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", nargs="+", choices=tuple(_MODELS), default=tuple(_MODELS))
    parser.add_argument("--load", nargs=2, metavar=("PATH", "PACKED_DIR"), help="load it here and say what that took")
    parser.add_argument("--save", action="store_true", help="keep the JSON under bench/results")
    arguments = parser.parse_args()
    if arguments.load:
        print(json.dumps(_load(*arguments.load)))
        return
    prioritise()
    report = measure(arguments.rounds, arguments.models)
    report.print()
    if arguments.save:
        print(f"saved {report.save().relative_to(Path.cwd())}")


if __name__ == "__main__":
    main()
