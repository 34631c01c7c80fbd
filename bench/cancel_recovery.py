"""Cancel recovery: long prefills are cancelled, then a new request is sent at once; its TTFT beside an idle system's.

A real cluster of one prefill and one decode worker. Rounds alternate: idle, cancelled. The aim is 1.2 times the idle
TTFT. A cancelled prefill still ends the chunk it is in, so half a chunk is lost on average, a whole one at most: much
to a request of a chunk's length, little to a long one.
"""

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from bench.checkpoints import SHAPES, random_checkpoint
from bench.load import ForeignLoad, prioritise
from bench.report import Report, Row
from tests.faults.scene import Scene
from tests.faults.streams import Answer, Asked
from tests.helpers.cluster import running_cluster

NUM_CANCELLED = 10
AIM = 1.2
FREE_LIMIT_S = 10.0


def prompt_of(source: random.Random, num_tokens: int) -> Asked:
    """A prompt that no worker has seen, one token to generate after the first."""
    return Asked(tuple(source.randrange(10, 4000) for _ in range(num_tokens)), max_tokens=2)


def ttft_s(answer: Answer) -> float:
    """Waits for the first token."""
    answer.wait(1)
    assert answer.pieces, answer.error
    return answer.pieces[0].at_s - answer.sent_s


def idle_ttft_s(scene: Scene, fresh: Asked) -> float:
    """Of a new request when nothing runs."""
    with scene.ask(fresh) as answer:
        taken_s = ttft_s(answer)
        answer.wait()
    return taken_s


def cancelled_ttft_s(scene: Scene, long: Sequence[Asked], fresh: Asked, delay_s: float) -> tuple[float, float]:
    """TTFT of a request sent right after all of `long` were cancelled, `delay_s` after a chunk of theirs was seen to be
    computed; then how long after that all blocks were free.
    """
    answers = [scene.ask(asked) for asked in long]
    scene.cluster.wait(lambda: scene.cluster.blocks("prefill-0")["leased"], timeout_s=60.0)
    time.sleep(delay_s)
    for answer in answers:
        answer.hang_up()
    assert not any(answer.pieces for answer in answers), "a prefill had ended before it was cancelled"
    taken_s = idle_ttft_s(scene, fresh)
    return taken_s, scene.seconds_until_free(scene.workers(), time.monotonic(), FREE_LIMIT_S)


def measure(scene: Scene, num_tokens: int, arguments: argparse.Namespace) -> list[Row]:
    """Rows of one length of the new request. The first round warms up: first steps, first connections."""
    source = random.Random(num_tokens)
    load = ForeignLoad()
    idle, cancelled, freed = list[float](), list[float](), list[float]()
    for _ in range(arguments.rounds + 1):
        idle.append(idle_ttft_s(scene, prompt_of(source, num_tokens)))
        long = [prompt_of(source, arguments.long_tokens) for _ in range(NUM_CANCELLED)]
        delay_s = source.uniform(0.0, arguments.max_delay_s)
        taken_s, free_s = cancelled_ttft_s(scene, long, prompt_of(source, num_tokens), delay_s)
        cancelled.append(taken_s)
        freed.append(free_s)
    workload = f"{num_tokens} tokens after {NUM_CANCELLED} x {arguments.long_tokens} cancelled"
    return rows_of(workload, idle[1:], cancelled[1:], freed[1:], load.cores())


def rows_of(workload: str, idle: list[float], cancelled: list[float], freed: list[float], foreign: float) -> list[Row]:
    before, after = statistics.median(idle), statistics.median(cancelled)
    ratio = after / before
    return [
        Row(workload, "tandem", "TTFT, idle", before, "s", samples=tuple(idle), foreign_cores=foreign),
        Row(workload, "tandem", "TTFT, cancelled", after, "s", samples=tuple(cancelled), foreign_cores=foreign),
        Row(workload, "tandem", "TTFT, cancelled / idle", ratio, "x", AIM, AIM / ratio, foreign_cores=foreign),
        Row(workload, "tandem", "blocks free after", statistics.median(freed), "s", samples=tuple(freed)),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="checkpoint directory; omitted: a random one of --shape")
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--tokens", type=int, action="append", help="of the new request; repeatable; 512 and 2048")
    parser.add_argument("--long-tokens", type=int, default=4096, help="of each cancelled request")
    parser.add_argument("--max-num-batched-tokens", type=int, help="of a step; omitted: the default")
    parser.add_argument("--max-delay-s", type=float, default=0.5, help="so that chunks are met anywhere in the middle")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", action="store_true", help="keep the JSON under bench/results")
    arguments = parser.parse_args()
    prioritise()
    model = arguments.model or random_checkpoint(arguments.shape)
    chunk = arguments.max_num_batched_tokens
    flags = () if chunk is None else ("--max-num-batched-tokens", str(chunk), "--max-num-running", "64")
    with running_cluster(model, extra={"worker": flags}) as cluster:
        scene = Scene(cluster)
        scene.heal()
        rows = [row for tokens in arguments.tokens or (512, 2048) for row in measure(scene, tokens, arguments)]
    config = {"model": model.name, "long_tokens": arguments.long_tokens, "chunk": chunk, "rounds": arguments.rounds}
    report = Report("cancel-recovery", config | {"prefill": 1, "decode": 1}, rows)
    report.print()
    if arguments.save:
        print(f"saved {report.save().relative_to(Path.cwd())}")


if __name__ == "__main__":
    main()
