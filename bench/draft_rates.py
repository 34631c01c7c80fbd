"""Speculative decoding at given rates of acceptance: tokens per second with drafts over those without.

    python -m bench.draft_rates [--shape hybrid-124m] [--acceptance 0,0.6,0.7,0.8] [--batches 1,4] [--cost 0] [--save]

A model of random weights answers once. A drafter that knows the answers then guesses right at each position with the
given probability. A guess of a token costs nothing, or `--cost` of one stream's step without drafts, in which the
drafter keeps a core busy. So what is measured is checking, and the choice of lengths. Turns, ratios and the check of
tokens are those of `bench.speculate`, and so is what an interrupt does.
"""

import argparse
import random
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from bench.checkpoints import EXPERT_SHAPES, HYBRID_SHAPES, SHAPES, random_checkpoint
from bench.load import ForeignLoad, prioritise
from bench.report import Report, Row
from bench.speculate import OFF, Run, Speaker, require_equal, rows_of
from tandem.engine.drafts.artificial import ReplayDrafter
from tandem.engine.drafts.speculation import Speculation

PROMPT_TOKENS = 48
ALL_SHAPES = SHAPES | EXPERT_SHAPES | HYBRID_SHAPES


class CostlyDrafter(ReplayDrafter):
    """Takes `depth_s` for one more token of all guesses."""

    def __init__(
        self, answers: Mapping[tuple[int, ...], Sequence[int]], vocab_size: int, acceptance: float, depth_s: float
    ) -> None:
        super().__init__(answers, vocab_size, acceptance)
        self._depth_s = depth_s

    def draft(self, limits: Mapping[str, int]) -> Mapping[str, Sequence[int]]:
        began_s = time.perf_counter()
        found = super().draft(limits)
        until_s = began_s + self._depth_s * max(map(len, found.values()), default=0)
        while time.perf_counter() < until_s:
            pass
        return found


def measure(
    path: Path,
    acceptances: Sequence[float],
    batches: Sequence[int],
    num_tokens: int,
    rounds: int,
    shape: str,
    cost: float = 0.0,
) -> Report:
    """All acceptances, one after the other, as far as it is not interrupted: two engines are in memory at once.

    Raises:
        RuntimeError: drafts changed a token.
    """
    rng = random.Random(0)
    prompts = [[rng.randrange(6, 250) for _ in range(PROMPT_TOKENS)] for _ in range(max(batches))]
    plain = Speaker(path, OFF)
    answers = dict(zip(map(tuple, prompts), plain.run(prompts, num_tokens).answers, strict=True))
    depth_s = cost / plain.run(prompts[:1], num_tokens).tokens_per_s
    rows: list[Row] = []
    with suppress(KeyboardInterrupt):
        for acceptance in acceptances:
            drafter = CostlyDrafter(answers, plain.engine.model.vocab_size, acceptance, depth_s)
            speakers = {OFF: plain, "drafts": Speaker(path, OFF, Speculation(drafter))}
            for batch in batches:
                runs: dict[str, list[Run]] = defaultdict(list)
                load = ForeignLoad()
                for _ in range(rounds):
                    for name in rng.sample(sorted(speakers), len(speakers)):
                        runs[name].append(speakers[name].run(prompts[:batch], num_tokens))
                workload = f"{shape}, acceptance {acceptance:g}, batch {batch}"
                require_equal(workload, runs)
                rows += rows_of(workload, runs, load.cores())
            speakers["drafts"].engine.close()
    plain.engine.close()
    return Report("draft-rates", {"shape": shape, "tokens": num_tokens, "rounds": rounds, "cost": cost}, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=ALL_SHAPES, default="hybrid-124m")
    parser.add_argument("--acceptance", default="0,0.6,0.7,0.8", help="probabilities that a guess is right")
    parser.add_argument("--batches", default="1,4", help="numbers of requests")
    parser.add_argument("--cost", type=float, default=0.0, help="of a guessed token, as a share of a step")
    parser.add_argument("--tokens", type=int, default=100, help="of each answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", action="store_true", help="keep the JSON under bench/results")
    arguments = parser.parse_args()
    acceptances = [float(number) for number in arguments.acceptance.split(",")]
    batches = [int(number) for number in arguments.batches.split(",")]
    if not all(0 <= acceptance <= 1 for acceptance in acceptances):
        parser.error(f"--acceptance {arguments.acceptance}: use numbers from 0 to 1")
    if not 0 <= arguments.cost <= 1:
        parser.error(f"--cost {arguments.cost:g}: use a number from 0 to 1")
    if arguments.tokens < 2 or min(batches) < 1:
        parser.error("--tokens: at least 2, since the first is not timed; --batches: at least 1")
    prioritise()
    path = random_checkpoint(arguments.shape)
    report = measure(path, acceptances, batches, arguments.tokens, arguments.rounds, arguments.shape, arguments.cost)
    report.print()
    if arguments.save:
        print(f"saved {report.save().relative_to(Path.cwd())}")


if __name__ == "__main__":
    main()
