"""Products of packed bfloat16 weights with few rows, as in steps of one stream with drafts: time by number of rows.

    python -m bench.few_rows [--rows 1,2,4,8,16] [--rounds 15] [--beside LIBRARY] [--save]

The weights of 14 layers of Qwen3-0.6B's shape, 382 MB, come from memory in each round. The floor is their size at the
read bandwidth. `--beside` names another compiled library (`python -m tandem.compute.native.build` prints this tree's):
both then run in turns whose order changes, since memory's speed varies with other tenants of the machine.
"""

import argparse
import ctypes
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from bench.floor import read_bandwidth
from bench.load import ForeignLoad, prioritise
from bench.report import Report, Row
from tandem.compute.huge_pages import advise_huge_pages
from tandem.compute.native.bindings import NativeKernels
from tandem.compute.native.build import load_library
from tandem.compute.order import Order

NUM_LAYERS = 14
SHAPES = (2048, 1024), (1024, 2048), (6144, 1024), (1024, 3072)  # outputs, inputs
OWN, OTHER = "tandem", "the other library"


def packed(kernels: NativeKernels, num_outputs: int, num_inputs: int) -> torch.Tensor:
    weight = kernels.pack(torch.randn(num_outputs, num_inputs).mul_(0.02).bfloat16())
    out = torch.empty_like(weight)
    advise_huge_pages(out)
    return out.copy_(weight)


def product_s(kernels: NativeKernels, weights: Sequence[torch.Tensor], num_rows: int) -> float:
    """Seconds of one pass over all weights."""
    rows = {size: torch.randn(num_rows, size).bfloat16() for size in {weight.shape[1] for weight in weights}}
    began_s = time.perf_counter()
    for weight in weights:
        kernels.linear(rows[weight.shape[1]], weight, order=Order.STRIPS)
    return time.perf_counter() - began_s


def measure(libraries: Mapping[str, NativeKernels], numbers: Sequence[int], rounds: int) -> Report:
    """All numbers of rows with all libraries, in an order that changes from round to round."""
    own = libraries[OWN]
    weights = [packed(own, *shape) for _ in range(NUM_LAYERS) for shape in SHAPES]
    num_bytes = sum(weight.nbytes for weight in weights)
    order, load, floors_s = random.Random(0), ForeignLoad(), [num_bytes / read_bandwidth()]
    found: dict[tuple[str, int], list[float]] = defaultdict(list)
    for _ in range(rounds):
        for num_rows in order.sample(numbers, len(numbers)):
            for name in order.sample(sorted(libraries), len(libraries)):
                found[name, num_rows].append(product_s(libraries[name], weights, num_rows))
    floors_s.append(num_bytes / read_bandwidth())
    floor_ms, foreign = 1e3 * statistics.mean(floors_s), load.cores()
    rows = []
    for (name, num_rows), seconds in sorted(found.items(), key=lambda item: (item[0][1], item[0][0])):
        times_ms = tuple(1e3 * each for each in seconds)
        middle_ms = statistics.median(times_ms)
        label = f"{num_rows} rows"
        rows.append(Row(label, name, "products", middle_ms, "ms", floor_ms, floor_ms / middle_ms, times_ms, foreign))
        if name != OWN:
            ratios = tuple(other / mine for other, mine in zip(seconds, found[OWN, num_rows], strict=True))
            rows.append(Row(label, name, f"time over {OWN}'s", statistics.median(ratios), "x", samples=ratios))
    return Report("few-rows", {"bytes": num_bytes, "rounds": rounds}, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,2,4,6,8,12,16,32", help="numbers of rows")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--beside", type=Path, help="another compiled library of the kernels; omitted: none")
    parser.add_argument("--save", action="store_true", help="keep the JSON under bench/results")
    arguments = parser.parse_args()
    numbers = [int(number) for number in arguments.rows.split(",")]
    if min(numbers) < 1 or arguments.rounds < 1:
        parser.error("--rows, --rounds: use numbers from 1")
    prioritise()
    libraries = {OWN: NativeKernels(load_library())}
    if arguments.beside is not None:
        libraries[OTHER] = NativeKernels(ctypes.CDLL(str(arguments.beside)))
    report = measure(libraries, numbers, arguments.rounds)
    report.print()
    if arguments.save:
        print(f"saved {report.save().relative_to(Path.cwd())}")


if __name__ == "__main__":
    main()
