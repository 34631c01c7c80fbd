"""Training text of an EAGLE-3 head: a model's own answers, to prompts of its own and of the standard library, and the
hidden states behind them.

A chat model that is given the beginning of a user's turn goes on with a question (after Magpie, Xu et al. 2024,
arXiv:2406.08464), so questions need no data set. Everything is a function of the seed, the model and the installed
Python: each token is drawn from seed and position, whatever is computed beside it.
"""

import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from pydoc_data import topics

import torch

from tandem.core.config import EngineConfig
from tandem.core.sampling_params import SamplingParams
from tandem.engine.drafts.speculation import Speculation
from tandem.engine.engine import Engine
from tandem.engine.resolve import build_engine
from tandem.scheduler.output import NewRequest, SchedulerOutput
from tandem.text.chat_template import ChatTemplate
from tandem.text.tokenizer import Tokenizer
from tools.demo_corpus import mine_corpus

HELD_OUT_PER_THOUSAND = 60
_QUESTION = "\0question\0"
_MAX_QUESTION_TOKENS = 96
_TEXT_CHARACTERS = 900
_NUM_RUNNING = 64
_KV_BYTES = 2 << 30


@dataclass(frozen=True, slots=True)
class Example:
    """A rendered prompt and the model's answer.

    token_ids: of both.
    states: [len(token_ids) - 1, number of layers read * hidden], at every position but the last.
    is_greedy: whether each token of the answer is the likeliest; else it was drawn.
    is_held_out: not to be learnt from.
    """

    token_ids: Sequence[int]
    num_prompt_tokens: int
    states: torch.Tensor
    is_greedy: bool
    is_held_out: bool


@dataclass(frozen=True, slots=True)
class Amounts:
    """Numbers of questions by their kind, and the longest answer in tokens."""

    own: int = 1000
    library: int = 250
    summaries: int = 60
    answer_tokens: int = 192


class Recorder:
    """A `Drafter` and `StateReader` that guesses nothing. It keeps the states, in bfloat16, of requests that begin
    while `is_recording`. `layers`: as in `HiddenStates`.
    """

    def __init__(self, layers: tuple[int, ...]) -> None:
        self.layers = layers
        self.is_recording = True
        self._states: dict[str, list[torch.Tensor]] = {}

    def begin(self, request: NewRequest) -> None:
        if self.is_recording:
            self._states[request.request_id] = []

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        pass

    def draft(self, limits: Mapping[str, int]) -> Mapping[str, Sequence[int]]:
        return {}

    def end(self, request_id: str) -> None:
        pass

    def observe(self, step: SchedulerOutput, first_tokens: Sequence[int], states: torch.Tensor) -> None:
        for item, row in zip(step.scheduled, first_tokens, strict=True):
            if item.request_id in self._states:
                self._states[item.request_id].append(states[row : row + item.num_tokens].bfloat16().clone())

    def take(self, request_id: str) -> torch.Tensor:
        """[number of positions computed, layers * hidden], of a request that has ended; none if it was not recorded."""
        parts = self._states.pop(request_id, None)
        return torch.empty(0) if parts is None else torch.cat(parts)


class Asker:
    """A model that asks and answers. `layers`: whose inputs are kept of answers and their prompts."""

    def __init__(self, model: Path, layers: tuple[int, ...], seed: int) -> None:
        config = EngineConfig(
            model=str(model),
            dtype="bfloat16",
            max_model_len=2048,
            kv_cache_bytes=_KV_BYTES,
            max_num_running=_NUM_RUNNING,
            num_threads=1,
            prefix_caching=False,
        )
        self._recorder = Recorder(layers)
        self._engine: Engine = build_engine(config, speculation=Speculation(self._recorder))
        self._tokenizer = Tokenizer.load(model)
        self._template = ChatTemplate.load(model)
        self._seed = seed

    def examples(self, amounts: Amounts) -> list[Example]:
        """All questions with their answers; every second answer is greedy, the others are drawn."""
        questions = [*self._own_questions(amounts.own), *self._given_questions(amounts)]
        prompts = [self._encoded(self._template.render([_user(question)])) for question in questions]
        options = [
            SamplingParams(max_tokens=amounts.answer_tokens, temperature=0.0 if number % 2 else 0.7, seed=self._seed)
            for number in range(len(prompts))
        ]
        answered = zip(questions, prompts, options, self._answers(prompts, options), strict=True)
        return [
            Example(
                [*prompt, *answer],
                len(prompt),
                states[: len(prompt) + len(answer) - 1],
                params.temperature == 0,
                is_held_out(question),
            )
            for question, prompt, params, (answer, states) in answered
            if len(answer) > 1
        ]

    def close(self) -> None:
        self._engine.close()

    def _own_questions(self, num_questions: int) -> list[str]:
        """Different questions that the model asks; a few fewer than were drawn."""
        beginning, _, _ = self._template.render([_user(_QUESTION)]).partition(_QUESTION)
        prompts = [self._encoded(beginning)] * num_questions
        options = [
            SamplingParams(max_tokens=_MAX_QUESTION_TOKENS, temperature=0.9, top_p=0.9, seed=self._seed + number)
            for number in range(num_questions)
        ]
        self._recorder.is_recording = False
        texts = [self._tokenizer.decode(ids).strip() for ids, _ in self._answers(prompts, options)]
        self._recorder.is_recording = True
        return list(dict.fromkeys(text for text in texts if text))

    def _given_questions(self, amounts: Amounts) -> list[str]:
        order = random.Random(self._seed)
        asked = sorted({chat.turns[0].content for chat in mine_corpus().conversations})
        passages = sorted(text[:_TEXT_CHARACTERS] for text in topics.topics.values())
        summaries = [f"Summarise the following text.\n\n{text}" for text in passages]
        return [*order.sample(asked, amounts.library), *order.sample(summaries, min(amounts.summaries, len(summaries)))]

    def _answers(
        self, prompts: Sequence[Sequence[int]], options: Sequence[SamplingParams]
    ) -> list[tuple[list[int], torch.Tensor]]:
        """An answer for each prompt, and the states of both. A few are asked at a time, the next as others end."""
        engine = self._engine
        waiting: Iterator[tuple[Sequence[int], SamplingParams]] = iter(zip(prompts, options, strict=True))
        answers: dict[str, list[int]] = {}
        states: dict[str, torch.Tensor] = {}  # in one piece as soon as a request ends, or small ones fill the memory
        num_open = 0
        while True:
            for prompt, params in islice(waiting, 2 * _NUM_RUNNING - num_open):
                answers[engine.add_request(list(prompt), params)] = []
                num_open += 1
            if not num_open:
                return [(answer, states[request_id]) for request_id, answer in answers.items()]
            for output in engine.step():
                answers[output.request_id].extend(output.token_ids)
                if output.finish_reason is not None:
                    states[output.request_id] = self._recorder.take(output.request_id)
                    num_open -= 1

    def _encoded(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def is_held_out(question: str) -> bool:
    """Whether a question is kept for measurement, by the hash of its text alone."""
    return int(hashlib.sha256(question.encode()).hexdigest()[:8], 16) % 1000 < HELD_OUT_PER_THOUSAND


def _user(content: str) -> Mapping[str, str]:
    return {"role": "user", "content": content}
