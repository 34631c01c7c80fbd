"""Prefill of one long prompt by ranks that divide its tokens, or layers, beside one rank with as many threads.

    python -m bench.contexts [--shape qwen3-8-layers] [--tokens 8192] [--chunk 512] [--rounds 5] [--save]

The systems take turns in one process that leads all groups, so ranks of one that has no turn wait for its steps. The
processor time is that of all ranks: it tells what a division costs even where others use the machine.
"""

import argparse
import contextlib
import random
import statistics
import time
from collections import defaultdict
from pathlib import Path

import psutil
import torch

from bench.checkpoints import SHAPES, random_checkpoint
from bench.load import ForeignLoad, prioritise
from bench.report import Report, Row
from tandem.core.config import EngineConfig
from tandem.core.sampling_params import SamplingParams
from tandem.engine.engine import Engine
from tandem.engine.resolve import assemble, build_engine
from tandem.ranks.group import RankGroup, share_of

NUM_RANKS = 2
ONE = "one rank"
GROUPS = {"cp 2": NUM_RANKS, "tp 2": 1}  # contexts
ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


def prefill_s(engine: Engine, num_tokens: int, rng: random.Random) -> float:
    """Seconds until a request of so many random tokens has its first token."""
    engine.add_request([rng.randrange(6, 250) for _ in range(num_tokens)], ONE_TOKEN)
    began_s = time.perf_counter()
    while engine.has_work:
        engine.step()
    return time.perf_counter() - began_s


def processor_s(group: RankGroup | None) -> float:
    """Of this process and the other ranks of a group, so far."""
    pids = () if group is None else group.process_ids.values()
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return time.process_time() + sum(each.user + each.system for each in times)


def measure(path: Path, num_tokens: int, chunk: int, rounds: int, shape: str) -> Report:
    """Medians of each system, and of the ratios of neighbouring turns."""
    config = EngineConfig(
        str(path),
        num_threads=NUM_RANKS,
        kv_cache_bytes=1 << 30,
        max_num_batched_tokens=chunk,
        max_model_len=num_tokens + 1,
        prefix_caching=False,
    )
    share = share_of(config, NUM_RANKS)
    wall: dict[str, list[float]] = defaultdict(list)
    processor: dict[str, list[float]] = defaultdict(list)
    with contextlib.ExitStack() as opened:
        groups: dict[str, RankGroup | None] = {}
        engines: dict[str, Engine] = {}
        for name, num_contexts in GROUPS.items():
            group = RankGroup(share, NUM_RANKS, num_contexts=num_contexts)
            opened.callback(group.close)
            groups[name], engines[name] = group, assemble(share, ranks=group).engine
        groups[ONE], engines[ONE] = None, build_engine(config)
        rng = random.Random(num_tokens)
        for name, engine in engines.items():
            _turn_s(engine, name, chunk, rng)
        load = ForeignLoad()
        for _ in range(rounds):
            for name, engine in engines.items():
                began_s = processor_s(groups[name])
                wall[name].append(_turn_s(engine, name, num_tokens, rng))
                processor[name].append(processor_s(groups[name]) - began_s)
        foreign = load.cores()
        for engine in engines.values():
            engine.close()
    workload = f"{shape}, {num_tokens} tokens in chunks of {chunk}"
    rows = [
        Row(workload, name, metric, statistics.median(found[name]), "s", samples=tuple(found[name]))
        for metric, found in (("prefill", wall), ("processor time of all ranks", processor))
        for name in found
    ]
    for name in GROUPS:
        for metric, found in (("speed over one rank", wall), ("processor time: one rank over it", processor)):
            ratios = tuple(one / many for one, many in zip(found[ONE], found[name], strict=True))
            value = statistics.median(ratios)
            rows.append(Row(workload, name, metric, value, "x", samples=ratios, foreign_cores=foreign))
    return Report("contexts", {"shape": shape, "tokens": num_tokens, "chunk": chunk, "rounds": rounds}, rows)


def _turn_s(engine: Engine, name: str, num_tokens: int, rng: random.Random) -> float:
    """`prefill_s` with the threads that are the system's."""
    torch.set_num_threads(NUM_RANKS if name == ONE else 1)
    return prefill_s(engine, num_tokens, rng)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8-layers")
    parser.add_argument("--tokens", type=int, default=8192, help="of the prompt")
    parser.add_argument("--chunk", type=int, default=512, help="tokens of a step")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", action="store_true", help="keep the JSON under bench/results")
    arguments = parser.parse_args()
    if min(arguments.tokens, arguments.chunk, arguments.rounds) < 1:
        parser.error("--tokens, --chunk and --rounds: at least 1")
    prioritise()
    path = random_checkpoint(arguments.shape)
    report = measure(path, arguments.tokens, arguments.chunk, arguments.rounds, arguments.shape)
    report.print()
    if arguments.save:
        print(f"saved {report.save().relative_to(Path.cwd())}")


if __name__ == "__main__":
    main()
