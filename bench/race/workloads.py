"""Workloads of the race: each plays its requests through `Ask` and names the figures that they make.

Prompts are random token ids that depend on the seed only, so every system gets the same ones. Knows no HTTP.
"""

import asyncio
import random
from collections import deque
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from bench.race.answer import Answer, Gap, WrongAnswerError, gap_figures, median_ttft_ms, tpot_figures, wall_s
from bench.race.work import Span, Work

Prompt = list[int]
Figures = dict[str, float]
_TOKEN_IDS = (10, 4000)  # NOTE: words of the demo's tokenizer, none of them special


class Ask(Protocol):
    """Sends one request and reads its answer to the end; sets `begun` when its first token is here."""

    async def __call__(self, prompt: Prompt, num_output: int, begun: asyncio.Event | None = None) -> Answer: ...


class Workload(Protocol):
    """One line of the race. `repeats`: how often it is played in one round."""

    @property
    def key(self) -> str: ...

    @property
    def title(self) -> str: ...

    @property
    def repeats(self) -> int: ...

    async def play(self, ask: Ask, seed: str) -> "Played": ...

    def figures(self, played: "Played") -> Figures: ...

    def warm_up(self) -> "Workload":
        """Of the same kind and width, but short."""
        ...

    def work(self) -> Work | None:
        """The least that must be computed for one play of it; None: no figure has a floor of its own."""
        ...


@dataclass(frozen=True, slots=True)
class Played:
    """Result of it. `burst`: answers apart from the others, and nothing before `burst_s` belongs to it."""

    answers: Sequence[Answer]
    burst: Sequence[Answer] = ()
    burst_s: float = 0.0

    @property
    def everything(self) -> Sequence[Answer]:
        return (*self.answers, *self.burst)


@dataclass(frozen=True, slots=True)
class Batch:
    """`num_requests` prompts of `shared` common and `own` distinct tokens, `concurrency` at a time, closed loop."""

    key: str
    title: str
    num_requests: int
    concurrency: int
    own: int
    output: int
    shared: int = 0
    repeats: int = 1

    async def play(self, ask: Ask, seed: str) -> Played:
        rng = random.Random(seed)
        prefix = _tokens(rng, self.shared)
        waiting = deque(prefix + _tokens(rng, self.own) for _ in range(self.num_requests))
        answers: list[Answer] = []

        async def lane() -> None:
            while waiting:
                answers.append(await ask(waiting.popleft(), self.output))

        await together(lane() for _ in range(self.concurrency))
        return Played(answers)

    def figures(self, played: Played) -> Figures:
        answers = played.answers
        found = {"TTFT p50": median_ttft_ms(answers)}
        if self.output == 1:
            prompt_tokens = self.num_requests * (self.shared + self.own)
            return found | {"prompt rate": prompt_tokens / wall_s(answers)}
        found |= tpot_figures(answers) | gap_figures([gap for one in answers for gap in one.gaps()])
        return found | {"output rate": self.num_requests * self.output / wall_s(answers)}

    def warm_up(self) -> "Batch":
        if self.output == 1:
            return self
        return replace(self, num_requests=self.concurrency, output=min(self.output, 8))

    def work(self) -> Work:
        length = self.shared + self.own
        spans = [Span(0, self.shared)] if self.shared else []
        spans += [Span(self.shared, length)] * self.num_requests
        decodes = [Span(length, length + self.output - 1)] * self.num_requests
        waves = -(-self.num_requests // self.concurrency)
        return Work(tuple(spans), tuple(decodes), num_steps=waves * (self.output - 1))


@dataclass(frozen=True, slots=True)
class Conversations:
    """`users` talk at once; each turn's prompt is all that was said, the answers' own tokens included, and new ones."""

    key: str
    title: str
    users: int
    turns: int
    first: int
    later: int
    output: int
    repeats: int = 1

    async def play(self, ask: Ask, seed: str) -> Played:
        answers: list[Answer] = []

        async def user(index: int) -> None:
            rng = random.Random(f"{seed}/{index}")
            prompt = _tokens(rng, self.first)
            for turn in range(self.turns):
                answer = await ask(prompt, self.output)
                answers.append(answer)
                if len(answer.token_ids) != self.output:
                    raise WrongAnswerError("the events have no token ids, so the conversation cannot go on")
                if turn + 1 < self.turns:
                    prompt = [*prompt, *answer.token_ids, *_tokens(rng, self.later)]

        await together(user(index) for index in range(self.users))
        return Played(answers)

    def figures(self, played: Played) -> Figures:
        answers = played.answers
        gaps = [gap for one in answers for gap in one.gaps()]
        rate = {"output rate": len(answers) * self.output / wall_s(answers)}
        return {"TTFT p50": median_ttft_ms(answers)} | tpot_figures(answers) | gap_figures(gaps) | rate

    def warm_up(self) -> "Conversations":
        return replace(self, turns=min(self.turns, 2), output=min(self.output, 8))

    def work(self) -> Work:
        """NOTE: of an answer all but the last token have KV when the next turn begins."""
        prefills: list[Span] = []
        decodes: list[Span] = []
        known, length = 0, self.first
        for _ in range(self.turns):
            prefills.append(Span(known, length))
            decodes.append(Span(length, length + self.output - 1))
            known, length = length + self.output - 1, length + self.output + self.later
        steps = self.turns * (self.output - 1)
        return Work(tuple(prefills) * self.users, tuple(decodes) * self.users, num_steps=steps)


@dataclass(frozen=True, slots=True)
class Burst:
    """`streams` decode; when all have begun, `burst` long prompts come at once. The streams' gaps meanwhile count."""

    key: str
    title: str
    streams: int
    stream_prompt: int
    stream_output: int
    burst: int
    burst_prompt: int
    repeats: int = 1

    async def play(self, ask: Ask, seed: str) -> Played:
        rng = random.Random(seed)
        begun = [asyncio.Event() for _ in range(self.streams)]
        prompts = [_tokens(rng, self.stream_prompt) for _ in begun]
        long_prompts = [_tokens(rng, self.burst_prompt) for _ in range(self.burst)]
        answers: list[Answer] = []
        burst: list[Answer] = []

        async def stream(prompt: Prompt, event: asyncio.Event) -> None:
            answers.append(await ask(prompt, self.stream_output, event))

        async def long_one(prompt: Prompt) -> None:
            await asyncio.gather(*(event.wait() for event in begun))
            burst.append(await ask(prompt, 1))

        streams = [stream(prompt, event) for prompt, event in zip(prompts, begun, strict=True)]
        await together([*streams, *(long_one(prompt) for prompt in long_prompts)])
        return Played(answers, burst, burst_s=min(answer.sent_s for answer in burst))

    def figures(self, played: Played) -> Figures:
        end_s = max(answer.ended_s for answer in played.burst)
        rates = {
            "output rate": self.streams * self.stream_output / wall_s(played.answers),
            "prompt rate": self.burst * self.burst_prompt / wall_s(played.burst),
        }
        gaps = gaps_between(played.answers, played.burst_s, end_s)
        return {"TTFT p50": median_ttft_ms(played.burst)} | gap_figures(gaps) | rates

    def warm_up(self) -> "Burst":
        return replace(self, stream_output=min(self.stream_output, 16), burst=1)

    def work(self) -> None:
        """Prompts and answers share the machine by the system's own choice."""


def gaps_between(answers: Iterable[Answer], start_s: float, end_s: float) -> list[Gap]:
    """The gaps of which any part lies in that time."""
    return [gap for one in answers for gap in one.gaps() if gap.end_s > start_s and gap.start_s < end_s]


async def together(work: Iterable[Coroutine[None, None, None]]) -> None:
    """All of it at once. The first that fails ends the others, and its error is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            for one in work:
                group.create_task(one)
    except* Exception as errors:
        raise errors.exceptions[0] from None


def _tokens(rng: random.Random, count: int) -> Prompt:
    return [rng.randrange(*_TOKEN_IDS) for _ in range(count)]


WORKLOADS: tuple[Workload, ...] = (
    Batch("single", "single 128/128", 1, 1, 128, 128, repeats=3),
    Batch("prefill-1", "prefill 1x2048", 1, 1, 2048, 1, repeats=3),
    Batch("prefill-8", "prefill 8x512", 8, 8, 512, 1, repeats=3),
    Batch("batch", "batch 32x256/64, 16 at once", 32, 16, 256, 64),
    Batch("shared", "shared 32x(1024+64)/32", 32, 32, 64, 32, shared=1024),
    Burst("burst", "burst 4x2048 into 8 streams", 8, 64, 256, 4, 2048),
    Conversations("turns", "4 turns, 8 users", 8, 4, 512, 64, 64),
)
