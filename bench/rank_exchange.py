"""One exchange between two ranks of a host, each a process of one thread: through shared memory, and by gloo beside it.

    python -m bench.rank_exchange [--kilobytes 4,64] [--rounds 20000] [--save]

Both add what the two ranks have, as after each row-split product of a layer. Times are those of rank 0, each call from
Python.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed

from bench.load import ForeignLoad, prioritise
from bench.report import Report, Row
from tandem.compute.native.exchange import SharedExchange, make_memory

NUM_RANKS, DEADLINE_S = 2, 60.0
WARM_UP, MIN_ROUNDS = 100, 10
GLOO, GLOO_TAKES = "gloo", 20  # times as long, so that it has a twentieth of the rounds
SHARES = ("p10", 10), ("p50", 50), ("p90", 90), ("p99", 99)


def exchanges(descriptor: int, rank: int, store: Path) -> dict[str, Callable[[torch.Tensor], object]]:
    """Methods that add the numbers of both ranks, by name. Every rank calls each with its own numbers."""
    shared = SharedExchange(descriptor, rank, NUM_RANKS, deadline_s=DEADLINE_S)
    torch.distributed.init_process_group("gloo", f"file://{store}", rank=rank, world_size=NUM_RANKS)
    return {
        "shared memory": lambda numbers: shared.add(numbers, None, torch.float32),
        GLOO: torch.distributed.all_reduce,
    }


def times_us(call: Callable[[torch.Tensor], object], num_bytes: int, rounds: int) -> list[float]:
    numbers = torch.zeros(1, num_bytes // 4)
    found: list[float] = []
    for _ in range(WARM_UP + rounds):
        began_ns = time.perf_counter_ns()
        call(numbers)
        found.append((time.perf_counter_ns() - began_ns) / 1000)
    return found[WARM_UP:]


def take_part(descriptor: int, rank: int, store: Path, sizes: Sequence[int], rounds: int) -> list[Row]:
    """In all exchanges, in the same order as the other rank."""
    torch.set_num_threads(1)
    rows: list[Row] = []
    for system, call in exchanges(descriptor, rank, store).items():
        num = max(MIN_ROUNDS, rounds // GLOO_TAKES if system == GLOO else rounds)
        for size in sizes:
            load = ForeignLoad()
            found = statistics.quantiles(times_us(call, size << 10, num), n=100)
            foreign = load.cores()
            rows += [
                Row(f"{size} KB of each rank", system, name, found[share - 1], "us", foreign_cores=foreign)
                for name, share in SHARES
            ]
    torch.distributed.destroy_process_group()
    return rows


def measure(sizes: Sequence[int], rounds: int) -> Report:
    descriptor = make_memory(NUM_RANKS)
    try:
        with tempfile.TemporaryDirectory() as folder:
            store = Path(folder) / "store"
            words = [*map(str, (descriptor, store, rounds)), ",".join(map(str, sizes))]
            command = [sys.executable, "-c", "from bench.rank_exchange import other; other()", *words]
            with subprocess.Popen(command, pass_fds=(descriptor,)) as process:
                rows = take_part(descriptor, 0, store, sizes, rounds)
            if process.returncode:
                raise RuntimeError(f"the other rank ended with {process.returncode}")
    finally:
        os.close(descriptor)
    return Report("rank-exchange", {"kilobytes": sizes, "rounds": rounds}, rows)


def other() -> None:
    """Rank 1."""
    descriptor, store, rounds, sizes = sys.argv[1:]
    take_part(int(descriptor), 1, Path(store), [int(size) for size in sizes.split(",")], int(rounds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kilobytes", default="4,64", help="that each rank adds in an exchange")
    parser.add_argument("--rounds", type=int, default=20000, help="exchanges of each size by shared memory")
    parser.add_argument("--save", action="store_true", help="keep the JSON under bench/results")
    arguments = parser.parse_args()
    sizes = [int(size) for size in arguments.kilobytes.split(",")]
    if min(sizes) < 1 or max(sizes) > 4096 or arguments.rounds < MIN_ROUNDS:
        parser.error(f"--kilobytes: 1 to 4096; --rounds: at least {MIN_ROUNDS}")
    prioritise()
    report = measure(sizes, arguments.rounds)
    report.print()
    if arguments.save:
        print(f"saved {report.save().relative_to(Path.cwd())}")


if __name__ == "__main__":
    main()
