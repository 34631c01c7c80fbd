"""Cost of telling the ranks of a worker a step: one message of what has changed, the same for all of them.

    python -m bench.rank_steps [--widths 2,4] [--batches 1,16,64] [--chunk-tokens 512] [--steps 200] [--save]

The engine and its ranks are real, of the demo checkpoint: what a step says does not depend on the model. Times are
those of the leader until all ranks were sent it, and of a rank to make a step of the bytes again.
"""

import argparse
import contextlib
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.checkpoints import DEMO
from bench.load import ForeignLoad, prioritise
from bench.report import Report, Row
from tandem.core.config import EngineConfig
from tandem.core.sampling_params import SamplingParams
from tandem.engine.engine import Engine
from tandem.engine.resolve import assemble
from tandem.ranks.group import RankGroup, share_of
from tandem.ranks.messages import Step, pack, unpack

PROMPT_CHUNKS = 4
FEW = 16  # tokens of the prompts that are then decoded


@dataclass(frozen=True, slots=True)
class ToldStep:
    """One step: who is told, and what it took. `num_new`: requests that it describes."""

    num_new: int
    num_requests: int
    num_tokens: int
    num_bytes: int
    send_us: float
    read_us: float


class NotedGroup(RankGroup):
    """Notes each step."""

    def __init__(self, config: EngineConfig, num_ranks: int) -> None:
        super().__init__(config, num_ranks)
        self.told: list[ToldStep] = []

    def begin_step(self, step: Step) -> None:
        began_s = time.perf_counter()
        super().begin_step(step)
        sent_s = time.perf_counter()
        data, work = pack(step), step.work
        packed_s = time.perf_counter()
        unpack(data)
        read_us = 1e6 * (time.perf_counter() - packed_s)
        requests = len(work.new), len(work.scheduled)
        self.told.append(ToldStep(*requests, work.num_tokens, len(data), 1e6 * (sent_s - began_s), read_us))


@contextlib.contextmanager
def led(num_ranks: int, chunk_tokens: int) -> Iterator[tuple[Engine, NotedGroup]]:
    config = EngineConfig(str(DEMO), num_threads=num_ranks, kv_cache_bytes=1 << 28, max_model_len=4096)
    config = share_of(replace(config, max_num_batched_tokens=chunk_tokens), num_ranks)
    group = NotedGroup(config, num_ranks)
    try:
        engine = assemble(config, ranks=group).engine
        yield engine, group
        engine.close()
    finally:
        group.close()


def decode_steps(engine: Engine, group: NotedGroup, batch: int, num_steps: int) -> list[ToldStep]:
    """Steps of so many requests, none of which is new."""
    params = SamplingParams(temperature=0.0, max_tokens=num_steps, ignore_eos=True)
    rng = random.Random(batch)
    for _ in range(batch):
        engine.add_request([rng.randrange(6, 250) for _ in range(FEW)], params)
    return [each for each in _told(engine, group) if each.num_tokens == each.num_requests == batch]


def chunks(
    engine: Engine, group: NotedGroup, chunk_tokens: int, num_prompts: int
) -> tuple[list[ToldStep], list[ToldStep]]:
    """First chunks of long prompts, which describe the request with its whole prompt, and later ones."""
    rng = random.Random(7)
    found: list[ToldStep] = []
    for _ in range(num_prompts):
        prompt = [rng.randrange(6, 4000) for _ in range(PROMPT_CHUNKS * chunk_tokens)]
        engine.add_request(prompt, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
        found += _told(engine, group)
    whole = [each for each in found if each.num_tokens == chunk_tokens]
    return [each for each in whole if each.num_new], [each for each in whole if not each.num_new]


def _told(engine: Engine, group: NotedGroup) -> list[ToldStep]:
    group.told.clear()
    while engine.has_work:
        engine.step()
    return list(group.told)


def measure(widths: Sequence[int], batches: Sequence[int], chunk_tokens: int, num_steps: int) -> Report:
    rows: list[Row] = []
    for width in widths:
        load = ForeignLoad()
        with led(width, chunk_tokens) as (engine, group):
            decode_steps(engine, group, 2, 20)
            cases = {f"decode step, batch {batch}": decode_steps(engine, group, batch, num_steps) for batch in batches}
            first, later = chunks(engine, group, chunk_tokens, max(2, num_steps // 20))
            cases[f"first {chunk_tokens} of {PROMPT_CHUNKS * chunk_tokens} prompt tokens"] = first
            cases[f"next {chunk_tokens} prompt tokens"] = later
        foreign = load.cores()
        for workload, told in cases.items():
            system = f"{width} ranks"
            figures = {
                ("message to each rank", "B"): [float(each.num_bytes) for each in told],
                ("leader, until all are sent it", "us"): [each.send_us for each in told],
                ("rank, until it has the step", "us"): [each.read_us for each in told],
            }
            rows += [
                Row(workload, system, metric, statistics.median(values), unit, foreign_cores=foreign)
                for (metric, unit), values in figures.items()
            ]
    config = {"widths": widths, "batches": batches, "chunk_tokens": chunk_tokens, "steps": num_steps}
    return Report("rank-steps", config, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", default="2,4", help="ranks of a worker")
    parser.add_argument("--batches", default="1,16,64", help="requests in a decode step")
    parser.add_argument("--chunk-tokens", type=int, default=512, help="of a prompt in a step")
    parser.add_argument("--steps", type=int, default=200, help="decode steps of each batch")
    parser.add_argument("--save", action="store_true", help="keep the JSON under bench/results")
    arguments = parser.parse_args()
    widths, batches = ([int(one) for one in words.split(",")] for words in (arguments.widths, arguments.batches))
    if not {*widths} <= {2, 4} or min(batches) < 1 or arguments.steps < 4 or not 256 <= arguments.chunk_tokens <= 1000:
        parser.error("--widths: 2 or 4; --batches: at least 1; --steps: at least 4; --chunk-tokens: 256 to 1000")
    prioritise()
    report = measure(widths, batches, arguments.chunk_tokens, arguments.steps)
    report.print()
    if arguments.save:
        print(f"saved {report.save().relative_to(Path.cwd())}")


if __name__ == "__main__":
    main()
