"""Drafters (`drafter.Drafter`) for tests and benchmarks: one makes a given share of right guesses, one guesses at
random.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tandem.core.randomness import uniform
from tandem.scheduler.output import NewRequest


@dataclass(slots=True)
class _Answer:
    token_ids: Sequence[int]
    num_reached: int


class ReplayDrafter:
    """Guesses from answers that are known, as from an earlier run.

    Args:
        answers: output tokens by prompt.
        vocab_size: of the model.
        acceptance: share of right guesses, from 0 to 1; which ones are right depends on their position. May
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
        self._followed[request_id].num_reached += len(token_ids)

    def draft(self, limits: Mapping[str, int]) -> Mapping[str, Sequence[int]]:
        drafts = {}
        for request_id, limit in limits.items():
            answer = self._followed[request_id]
            following = enumerate(answer.token_ids[answer.num_reached : answer.num_reached + limit], answer.num_reached)
            drafts[request_id] = [self._guess(position, token_id) for position, token_id in following]
        return drafts

    def end(self, request_id: str) -> None:
        del self._followed[request_id]

    def _guess(self, position: int, token_id: int) -> int:
        return token_id if uniform(0, position) < self.acceptance else (token_id + 1) % self._vocab_size


class RandomDrafter:
    """Guesses random tokens, as many as are allowed.

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
