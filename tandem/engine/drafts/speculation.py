"""Speculation: which guesses of a drafter the next step checks, from how well it guessed and what checking costs.

Part of an executor. A guess that was not checked is compared with the tokens that came nevertheless, so that a drafter
that has become better is noticed at no cost.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tandem.engine.drafts.drafter import Drafter
from tandem.engine.drafts.lengths import Guess, StepTimes, choose_lengths
from tandem.scheduler.output import NewRequest, SampledToken, SchedulerOutput

DEFAULT_MAX_DRAFTS = 7
_FIRST_ACCEPTANCE = 0.6
_WEIGHT = 0.1  # of one more guess in the mean of all requests
_KEPT = 0.9  # of the count of one request's earlier guesses, with each step
_PRIOR_GUESSES = 2.0  # of the mean of all requests, in the mean of one


@dataclass(slots=True)
class _Followed:
    """One request: its latest guess, and how many earlier ones were right, the recent ones counting most."""

    guess: Sequence[int] = ()
    num_right: float = 0.0
    num_judged: float = 0.0


class Speculation:
    """Drafts of one executor's requests.

    Args:
        drafter: guesses.
        max_drafts: the most tokens guessed for a request and step.
        adapts: whether the number of drafts follows what was measured; else all guesses are checked.
    """

    def __init__(self, drafter: Drafter, max_drafts: int = DEFAULT_MAX_DRAFTS, *, adapts: bool = True) -> None:
        self._drafter = drafter
        self._max_drafts = max_drafts
        self._adapts = adapts
        self._times = StepTimes()
        self._acceptance = _FIRST_ACCEPTANCE
        self._followed: dict[str, _Followed] = {}

    def begin(self, step: SchedulerOutput) -> None:
        """Forget and follow the requests that a step releases and describes."""
        for request_id in step.released:
            if self._followed.pop(request_id, None) is not None:
                self._drafter.end(request_id)
        for request in step.new:
            if self._wants_drafts(request):
                self._followed[request.request_id] = _Followed()
                self._drafter.begin(request)

    def drafts(
        self, step: SchedulerOutput, sampled: Mapping[str, Sequence[SampledToken]], seconds: float
    ) -> Mapping[str, Sequence[int]]:
        """Guesses to check in the next step, after one that took `seconds` and chose `sampled`."""
        if all(item.num_tokens == 1 + item.num_drafts for item in step.scheduled):
            self._times.note(step.num_tokens, seconds)
        limits: dict[str, int] = {}
        for request_id, tokens in sampled.items():
            followed = self._followed.get(request_id)
            if followed is not None and tokens[-1].is_token:
                token_ids = [token.token_id for token in tokens]
                self._judge(followed, token_ids)
                self._drafter.extend(request_id, token_ids)
                limits[request_id] = self._max_drafts
        guesses = self._drafter.draft(limits)
        for request_id in limits:
            self._followed[request_id].guess = guesses.get(request_id, ())
        if not self._adapts or not guesses:
            return guesses
        num_other_rows = sum(item.num_tokens for item in step.scheduled if not item.samples)
        ids = list(guesses)
        lengths = choose_lengths(
            [Guess(len(guesses[request_id]), self._acceptance_of(request_id)) for request_id in ids],
            len(sampled) + num_other_rows,
            self._times.seconds,
        )
        return {
            request_id: guesses[request_id][:length] for request_id, length in zip(ids, lengths, strict=True) if length
        }

    def _wants_drafts(self, request: NewRequest) -> bool:
        return True

    def _judge(self, followed: _Followed, token_ids: Sequence[int]) -> None:
        for guessed, chosen in zip(followed.guess, token_ids, strict=False):
            is_right = guessed == chosen
            followed.num_right = _KEPT * followed.num_right + is_right
            followed.num_judged = _KEPT * followed.num_judged + 1
            self._acceptance += _WEIGHT * (is_right - self._acceptance)
            if not is_right:
                break

    def _acceptance_of(self, request_id: str) -> float:
        followed = self._followed[request_id]
        return (followed.num_right + _PRIOR_GUESSES * self._acceptance) / (followed.num_judged + _PRIOR_GUESSES)
