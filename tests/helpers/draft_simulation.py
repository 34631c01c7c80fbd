"""Speculation in simulated time: steps and guesses take the seconds that a cost model says."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tandem.core.sampling_params import SamplingParams
from tandem.engine.drafts.known import KnowingDrafter
from tandem.engine.drafts.speculation import Speculation
from tandem.scheduler.output import NewRequest, SampledToken, ScheduledRequest, SchedulerOutput

VOCAB_SIZE = 100


def answer_of(index: int, num_tokens: int) -> list[int]:
    return [(index + 7 * position) % VOCAB_SIZE for position in range(num_tokens)]


class TimedDrafter(KnowingDrafter):
    """Takes `depth_s` for each token of the longest guess, and is right in `acceptance` of all."""

    def __init__(self, answers: Mapping[tuple[int, ...], Sequence[int]], acceptance: float, depth_s: float) -> None:
        super().__init__(answers, VOCAB_SIZE, acceptance)
        self.now_s = 0.0
        self.depth_s = depth_s

    def draft(self, limits: Mapping[str, int]) -> Mapping[str, Sequence[int]]:
        self.now_s += self.depth_s * max(limits.values(), default=0)
        return super().draft(limits)


@dataclass(slots=True)
class Simulated:
    """Lengths of the drafts checked in each step, and the time and tokens of all steps."""

    lengths: list[list[int]]
    seconds: float
    num_tokens: int


def simulate(
    drafter: TimedDrafter,
    answers: Mapping[tuple[int, ...], Sequence[int]],
    seconds: Callable[[int], float],
    num_steps: int,
    *,
    max_drafts: int = 7,
    adapts: bool = True,
    before_step: Callable[[int], None] = lambda _: None,
) -> Simulated:
    """Decode one request for each answer, in one batch. `seconds`: of a step by its number of rows."""
    speculation = Speculation(drafter, max_drafts, adapts=adapts, now_s=lambda: drafter.now_s)
    names = {str(index): prompt for index, prompt in enumerate(answers)}
    new = tuple(NewRequest(name, prompt, [], SamplingParams(), 0, frozenset(), b"") for name, prompt in names.items())
    drafts: Mapping[str, Sequence[int]] = {}
    positions = dict.fromkeys(names, 0)
    found = Simulated([], 0.0, 0)
    for number in range(num_steps):
        before_step(number)
        scheduled, sampled = [], {}
        for name, prompt in names.items():
            guess, answer, position = drafts.get(name, ()), answers[prompt], positions[name]
            scheduled.append(ScheduledRequest(name, 0, [1, *guess], True, num_drafts=len(guess)))
            num_right = next((i for i, token in enumerate(guess) if answer[position + i] != token), len(guess))
            chosen = answer[position : position + num_right + 1]
            positions[name] += len(chosen)
            sampled[name] = [SampledToken(token_id) for token_id in chosen]
        step = SchedulerOutput(new, tuple(scheduled), ())
        new = ()
        speculation.begin(step)
        found.lengths.append([item.num_drafts for item in scheduled])
        found.seconds += seconds(step.num_tokens)
        found.num_tokens += sum(map(len, sampled.values()))
        drafts = speculation.drafts(step, sampled, seconds(step.num_tokens))
    found.seconds += drafter.now_s
    return found
