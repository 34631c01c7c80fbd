"""Drafters for tests and benchmarks: one with a given share of right guesses, and one that guesses at random."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tandem.core.randomness import uniform
from tandem.scheduler.output import NewRequest


@dataclass(slots=True)
class _Answer:
    token_ids: Sequence[int]
    num_told: int


class KnowingDrafter:
    """A `Drafter` of requests whose answers are known, as from an earlier run.

    Args:
        answers: output tokens by prompt.
        vocab_size: of the model.
        acceptance: share of right guesses: 1 always knows, 0 always lies. Which ones depends on their position. May
            be changed.
    """

    def __init__(
        self, answers: Mapping[tuple[int, ...], Sequence[int]], vocab_size: int, acceptance: float = 1.0
    ) -> None:
        self._answers = answers
        self._vocab_size = vocab_size
        self.acceptance = acceptance
        self._followed: dict[str, _Answer] = {}

    def begin(self, request: NewRequest) -> None:
        answer = self._answers.get(tuple(request.prompt_token_ids), ())
        self._followed[request.request_id] = _Answer(answer, len(request.output_token_ids))

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        self._followed[request_id].num_told += len(token_ids)

    def draft(self, limits: Mapping[str, int]) -> Mapping[str, Sequence[int]]:
        drafts = {}
        for request_id, limit in limits.items():
            answer = self._followed[request_id]
            following = enumerate(answer.token_ids[answer.num_told : answer.num_told + limit], answer.num_told)
            drafts[request_id] = [self._guess(position, token_id) for position, token_id in following]
        return drafts

    def end(self, request_id: str) -> None:
        del self._followed[request_id]

    def _guess(self, position: int, token_id: int) -> int:
        return token_id if uniform(0, position) < self.acceptance else (token_id + 1) % self._vocab_size


class BlindDrafter:
    """A `Drafter` that guesses random tokens, as many as are allowed.

    Args:
        vocab_size: of the model.
        seed: of its numbers.
    """

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self._vocab_size = vocab_size
        self._seed = seed
        self._num_drawn = 0

    def begin(self, request: NewRequest) -> None:
        """Does nothing."""

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Does nothing."""

    def draft(self, limits: Mapping[str, int]) -> Mapping[str, Sequence[int]]:
        return {request_id: [self._draw() for _ in range(limit)] for request_id, limit in limits.items()}

    def end(self, request_id: str) -> None:
        """Does nothing."""

    def _draw(self) -> int:
        self._num_drawn += 1
        return int(uniform(self._seed, self._num_drawn) * self._vocab_size)
