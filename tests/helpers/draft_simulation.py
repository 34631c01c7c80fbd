"""Speculation in simulated time: steps and guesses take the seconds that a cost model says."""

import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tandem.core.sampling_params import SamplingParams
from tandem.engine.drafts.artificial import ReplayDrafter
from tandem.engine.drafts.speculation import Speculation
from tandem.scheduler.output import NewRequest, SampledToken, ScheduledRequest, SchedulerOutput

VOCAB_SIZE = 100
Cost = Callable[[int], float]


def answer_of(index: int, num_tokens: int) -> list[int]:
    return [(index + 7 * position) % VOCAB_SIZE for position in range(num_tokens)]


def row_cost(row_s: float) -> Cost:
    """A step takes a second, and `row_s` for each row."""
    return lambda num_rows: 1.0 + row_s * num_rows


class Disturbance(Protocol):
    """Effect of other processes on times. `pace`: factor by which everything takes longer at present."""

    pace: float

    def seems_s(self, num_drafts: int, seconds: float) -> float:
        """The seconds that the next step seems to take, of its number of drafts and those that it takes."""
        ...


class Quiet:
    """A `Disturbance` that is none."""

    pace = 1.0

    def seems_s(self, num_drafts: int, seconds: float) -> float:
        return seconds


class TimedDrafter(ReplayDrafter):
    """Takes `depth_s` for each token of the longest guess, and is right in `acceptance` of all. `now_s` is its time,
    and `seems_s` that at the pace of `disturbance`.
    """

    def __init__(self, answers: Mapping[tuple[int, ...], Sequence[int]], acceptance: float, depth_s: float) -> None:
        super().__init__(answers, VOCAB_SIZE, acceptance)
        self.now_s = self.seems_s = 0.0
        self.depth_s = depth_s
        self.disturbance: Disturbance = Quiet()

    def draft(self, limits: Mapping[str, int]) -> Mapping[str, Sequence[int]]:
        seconds = self.depth_s * max(limits.values(), default=0)
        self.now_s += seconds
        self.seems_s += seconds * self.disturbance.pace
        return super().draft(limits)


@dataclass(slots=True)
class Simulated:
    """Lengths of the drafts checked in each step, the undisturbed time and the tokens of all steps, and the time that
    the drafts are estimated to have saved.
    """

    lengths: list[list[int]] = field(default_factory=list)
    seconds: float = 0.0
    num_tokens: int = 0
    saved_s: float = 0.0


class Batch:
    """Steps of an engine that serves requests: what is scheduled, and the tokens that are right.

    Args:
        answers: by prompt.
        speculation: chooses the drafts; None = there are none.
    """

    def __init__(
        self, answers: Mapping[tuple[int, ...], Sequence[int]], speculation: Speculation | None, cost: Cost
    ) -> None:
        self._answers = answers
        self._speculation = speculation
        self._cost = cost
        self._positions: dict[str, int] = {}
        self._prompts: dict[str, tuple[int, ...]] = {}
        self._drafts: Mapping[str, Sequence[int]] = {}
        self._new: list[NewRequest] = []
        self._released: list[str] = []
        self.found = Simulated()

    @property
    def num_requests(self) -> int:
        return len(self._positions)

    def add(self, name: str, prompt: tuple[int, ...]) -> None:
        self._positions[name], self._prompts[name] = 0, prompt
        self._new.append(NewRequest(name, prompt, [], SamplingParams(), 0, frozenset(), b""))

    def step(self, disturbance: Disturbance) -> None:
        """Compute a step, and choose the drafts of the next."""
        scheduled, sampled = [], {}
        for name, prompt in self._prompts.items():
            answer, position = self._answers[prompt], self._positions[name]
            guess = self._drafts.get(name, ())[: len(answer) - position]
            scheduled.append(ScheduledRequest(name, 0, [1, *guess], True, num_drafts=len(guess)))
            num_accepted = next((i for i, token in enumerate(guess) if answer[position + i] != token), len(guess))
            chosen = answer[position : position + num_accepted + 1]
            self._positions[name] += len(chosen)
            sampled[name] = [SampledToken(token_id) for token_id in chosen]
        step = SchedulerOutput(tuple(self._new), tuple(scheduled), tuple(self._released))
        self._new, self._released = [], []
        seconds = self._cost(step.num_tokens)
        self.found.lengths.append([item.num_drafts for item in scheduled])
        self.found.seconds += seconds
        self.found.num_tokens += sum(map(len, sampled.values()))
        if self._speculation is not None:
            self._speculation.begin(step)
            num_drafts = sum(self.found.lengths[-1])
            self._drafts = self._speculation.drafts(step, sampled, disturbance.seems_s(num_drafts, seconds))
            num_tokens = sum(map(len, sampled.values())) / len(sampled)
            self.found.saved_s += self._speculation.take_times().saved_s(num_tokens)
        for name in [name for name, at in self._positions.items() if at >= len(self._answers[self._prompts[name]])]:
            del self._positions[name], self._prompts[name]
            self._released.append(name)


def simulate(
    drafter: TimedDrafter,
    answers: Mapping[tuple[int, ...], Sequence[int]],
    seconds: Cost,
    num_steps: int,
    *,
    max_drafts: int = 7,
    adapts: bool = True,
    before_step: Callable[[int], None] = lambda _: None,
    disturbance: Disturbance | None = None,
) -> Simulated:
    """Decode one request for each answer, in one batch. `seconds`: of a step by its number of rows."""
    drafter.disturbance = disturbance or Quiet()
    speculation = Speculation(drafter, max_drafts, adapts=adapts, now_s=lambda: drafter.seems_s)
    batch = Batch(answers, speculation, seconds)
    for index, prompt in enumerate(answers):
        batch.add(str(index), prompt)
    for number in range(num_steps):
        before_step(number)
        batch.step(drafter.disturbance)
    batch.found.seconds += drafter.now_s
    return batch.found


class Disturbances:
    """Seeded delays that other processes add to the seconds of steps.

    Args:
        seed: of all numbers.
        noise: a step seems to take up to this share more or less.
        share: of steps that take up to 20 times as long.
        bursts: share of steps at which 10 to 60 steps begin that take 1.5 to 4 times as long.
        first_s: seconds that the first step of a number of drafts takes more, as to compile kernels for it.
    """

    def __init__(
        self, seed: int, *, noise: float = 0.0, share: float = 0.0, bursts: float = 0.0, first_s: float = 0.0
    ) -> None:
        self._rng = random.Random(seed)
        self._noise, self._share, self._bursts, self._first_s = noise, share, bursts, first_s
        self._left, self._factor = 0, 1.0
        self.pace = 1.0
        self._seen: set[int] = {0}

    def seems_s(self, num_drafts: int, seconds: float) -> float:
        rng = self._rng
        seems_s = seconds * rng.uniform(1 - self._noise, 1 + self._noise)
        if rng.random() < self._bursts:
            self._left, self._factor = rng.randint(10, 60), rng.uniform(1.5, 4)
        self.pace = self._factor if self._left else 1.0
        self._left = max(0, self._left - 1)
        seems_s *= self.pace
        if rng.random() < self._share:
            seems_s *= rng.uniform(3, 20)
        if num_drafts not in self._seen:
            self._seen.add(num_drafts)
            seems_s += self._first_s
        return seems_s


def serve(
    answers: Mapping[tuple[int, ...], Sequence[int]],
    arrivals: Sequence[int],
    max_requests: int,
    seconds: Cost,
    drafter: TimedDrafter | None = None,
    disturbance: Disturbance | None = None,
) -> Simulated:
    """Decode requests that arrive at given numbers of tokens, so that batches change, until all have ended.

    Args:
        arrivals: for each answer, the number of tokens of all answers before which it does not begin.
        drafter: None = there are no drafts.
    """
    quiet: Disturbance = Quiet()
    speculation = None
    if drafter is not None:
        drafter.disturbance = disturbance or quiet
        speculation = Speculation(drafter, now_s=lambda: drafter.seems_s)
    batch = Batch(answers, speculation, seconds)
    waiting = deque(enumerate(zip(answers, arrivals, strict=True)))
    while waiting or batch.num_requests:
        while waiting and batch.num_requests < max_requests:
            index, (prompt, arrival) = waiting[0]
            if batch.num_requests and arrival > batch.found.num_tokens:
                break
            waiting.popleft()
            batch.add(str(index), prompt)
        batch.step(disturbance or quiet)
    if drafter is not None:
        batch.found.seconds += drafter.now_s
    return batch.found
