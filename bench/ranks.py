"""Prefill and decode steps of a worker's ranks beside those of one rank with as many threads and with one thread, their
processor time, and bytes of a rank.

    python -m bench.ranks [--shape qwen3-8-layers] [--sizes 1x2,2x1] [--batches 1,16] [--prompt-tokens 64] [--save]

A size is ranks of a stage or context x stages, and perhaps x contexts. Every rank has one thread. All take turns in one
process that leads all groups, so ranks of a size that has no turn wait for its steps. The processor time is that of all
ranks: it tells what a division costs even where others use the machine.
"""

import argparse
import contextlib
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil
import torch

from bench.checkpoints import SHAPES, random_checkpoint
from bench.load import ForeignLoad, prioritise
from bench.report import Report, Row
from tandem.architecture.stages import num_elements
from tandem.architecture.state import DTYPE_BYTES
from tandem.core.config import EngineConfig
from tandem.core.sampling_params import SamplingParams
from tandem.engine.engine import Engine
from tandem.engine.resolve import Assembly, assemble
from tandem.ranks.group import RankGroup, share_of

ONE, ONE_THREAD = "one rank", "one rank, one thread"
Size = tuple[int, ...]  # ranks of a stage or context, stages, and contexts


@dataclass(frozen=True, slots=True)
class Turns:
    """Work of each system in its turn. `chunk_tokens`: the most of a step."""

    prompt_tokens: int
    chunk_tokens: int
    steps: int
    rounds: int


def turn_s(engine: Engine, batch: int, turns: Turns, rng: random.Random) -> tuple[float, float]:
    """Seconds until `batch` requests have their first tokens, and of a decode step of all of them, the median."""
    params = SamplingParams(temperature=0.0, max_tokens=turns.steps + 1, ignore_eos=True)
    for _ in range(batch):
        engine.add_request([rng.randrange(6, 250) for _ in range(turns.prompt_tokens)], params)
    times: list[float] = []
    start_s = time.perf_counter()
    first_s = 0.0
    while engine.has_work:
        began_s = time.perf_counter()
        outputs = engine.step()
        if len(outputs) == batch and not any(output.finished for output in outputs):
            first_s = first_s or time.perf_counter() - start_s
            times.append(time.perf_counter() - began_s)
    return first_s, statistics.median(times[1:])


def processor_s(group: RankGroup | None) -> float:
    """Of this process and the other ranks of a group, so far."""
    pids = () if group is None else group.process_ids.values()
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return time.process_time() + sum(each.user + each.system for each in times)


def measure(path: Path, sizes: Sequence[Size], batches: Sequence[int], turns: Turns, shape: str) -> Report:
    """One size after the other beside one rank: the medians of each, and that of the ratios of neighbouring turns."""
    rows: list[Row] = []
    for size in sizes:
        width, num_stages, num_contexts = (*size, 1)[:3]
        num_ranks, name = width * num_stages * num_contexts, f"tp {width}, pp {num_stages}, cp {num_contexts}"
        config = EngineConfig(str(path), num_threads=num_ranks, kv_cache_bytes=1 << 30)
        config = replace(config, max_num_batched_tokens=turns.chunk_tokens)
        share = share_of(config, num_ranks)
        with contextlib.ExitStack() as opened:
            group = RankGroup(share, num_ranks, num_stages=num_stages, num_contexts=num_contexts)
            opened.callback(group.close)
            assemblies = {name: assemble(share, ranks=group), ONE: assemble(config)}
            engines = {system: assembly.engine for system, assembly in assemblies.items()}
            systems = {
                name: (engines[name], 1, group),
                ONE: (engines[ONE], num_ranks, None),
                ONE_THREAD: (engines[ONE], 1, None),
            }
            rows += [row for system, each in assemblies.items() for row in _bytes(shape, system, each)]
            for batch in batches:
                prefill: dict[str, list[float]] = defaultdict(list)
                decode: dict[str, list[float]] = defaultdict(list)
                processor: dict[str, list[float]] = defaultdict(list)
                load, rng = ForeignLoad(), random.Random(batch)
                for _ in range(turns.rounds):
                    for system, (engine, num_threads, leads) in systems.items():
                        torch.set_num_threads(num_threads)
                        began_s = processor_s(leads)
                        first_s, step_s = turn_s(engine, batch, turns, rng)
                        processor[system].append(1000 * (processor_s(leads) - began_s))
                        prefill[system].append(1000 * first_s)
                        decode[system].append(1000 * step_s)
                foreign, workload = load.cores(), f"{shape}, batch {batch}"
                rows += _rows(workload, f"prefill of {turns.prompt_tokens} tokens each", prefill, name, foreign)
                rows += _rows(workload, "decode step", decode, name, foreign)
                rows += _rows(workload, "processor time of a turn", processor, name, foreign)
            for engine in engines.values():
                engine.close()
    return Report("ranks", {"shape": shape, **asdict(turns)}, rows)


def _bytes(shape: str, system: str, assembly: Assembly) -> list[Row]:
    """Of the leader, which has a part of every kind of weight but the embedding."""
    model = assembly.model
    weights = num_elements(model) * DTYPE_BYTES[model.dtype]
    page_bytes = assembly.arena.layout.page_bytes
    return [
        Row(shape, system, "weights of the leader", weights / 1e6, "MB"),
        Row(shape, system, "KV of a block on a rank", page_bytes / 1e3, "KB"),
    ]


def _rows(workload: str, metric: str, found: dict[str, list[float]], name: str, foreign: float) -> list[Row]:
    ratios = {
        one: tuple(first / own for first, own in zip(found[one], found[name], strict=True)) for one in (ONE, ONE_THREAD)
    }
    return [
        *(
            Row(workload, system, metric, statistics.median(times), "ms", samples=tuple(times))
            for system, times in found.items()
        ),
        *(
            Row(
                workload,
                name,
                f"{metric}: {one} over it",
                statistics.median(each),
                "x",
                samples=each,
                foreign_cores=foreign,
            )
            for one, each in ratios.items()
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8-layers")
    parser.add_argument("--sizes", default="1x2,2x1", help="ranks of a stage or context x stages, and x contexts")
    parser.add_argument("--batches", default="1,16", help="numbers of requests")
    parser.add_argument("--steps", type=int, default=12, help="of decode in each turn")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--chunk-tokens", type=int, default=1024, help="the most of a step")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--save", action="store_true", help="keep the JSON under bench/results")
    arguments = parser.parse_args()
    sizes = [tuple(map(int, size.split("x"))) for size in arguments.sizes.split(",")]
    batches = [int(number) for number in arguments.batches.split(",")]
    if not all(2 <= len(size) <= 3 and min(size) > 0 for size in sizes) or min(*batches, arguments.prompt_tokens) < 1:
        parser.error("--sizes: as 1x2,2x1 or 1x1x2; --batches and --prompt-tokens: at least 1")
    if arguments.steps < 2 or arguments.chunk_tokens < 64:
        parser.error("--steps: at least 2; --chunk-tokens: at least 64, as many as requests run")
    prioritise()
    path = random_checkpoint(arguments.shape)
    turns = Turns(arguments.prompt_tokens, arguments.chunk_tokens, arguments.steps, arguments.rounds)
    report = measure(path, sizes, batches, turns, arguments.shape)
    report.print()
    if arguments.save:
        print(f"saved {report.save().relative_to(Path.cwd())}")


if __name__ == "__main__":
    main()
