"""Speculation: decides for which requests to draft and how many drafts the next step verifies.

It decides from the acceptance of earlier drafts, the measured costs of drafting and verifying, and the time that drafts
may still lose (`Allowance`). Used by an executor. Drafts that were not verified are compared with the tokens that were
sampled nevertheless, so that a drafter that has become better is noticed.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite, isinf

import torch

from tandem.core.speculate import OFF
from tandem.engine.drafts.allowance import Allowance
from tandem.engine.drafts.drafter import Drafter, StateCarrier, StateReader
from tandem.engine.drafts.lengths import Guess, choose_lengths
from tandem.engine.drafts.pace import Pace
from tandem.engine.drafts.step_times import NUM_SURE, PlainTimes, StepTimes
from tandem.scheduler.output import DraftTimes, SampledToken, SchedulerOutput

DEFAULT_MAX_DRAFTS = 7  # of one request in a step
_FIRST_ACCEPTANCE = 0.6
_WEIGHT = 0.1  # of one more draft in the mean acceptance of all requests
_KEPT = 0.9  # of the count of one request's earlier guesses, with each that is judged
_PRIOR_GUESSES = 2.0  # of the mean of all requests, in the mean of one
_CHEAP_SHARE = 0.005  # of a step: guessing that costs no more is done in every step
_FIRST_DRAFTS = 2  # tokens guessed to measure what guessing costs
_FIRST_PAUSE, _LONGEST_PAUSE = 8, 64  # steps between two trials of a drafter that did not pay
_MOST_UNUSUAL = 1.0  # steps without drafts: the most that one event counts beyond what is usual


@dataclass(slots=True)
class _Followed:
    """One request: its latest drafts, and how many earlier ones were judged and right, recent ones counting most."""

    guess: Sequence[int] = ()
    num_right: float = 0.0
    num_judged: float = 0.0


class Speculation:
    """Drafts of one executor's requests.

    Args:
        drafter: makes the drafts; gets hidden states if it is a `StateReader` too.
        max_drafts: the most drafts for a request and step.
        adapts: whether the number of drafts follows what was measured; else `max_drafts` are verified in each step.
        now_s: clock by which the drafter is timed.
    """

    def __init__(
        self,
        drafter: Drafter,
        max_drafts: int = DEFAULT_MAX_DRAFTS,
        *,
        adapts: bool = True,
        now_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._drafter = drafter
        self._reader = drafter if isinstance(drafter, StateReader) else None
        self._max_drafts = max_drafts
        self._adapts = adapts
        self._now_s = now_s
        self._measure_anew()
        self._allowance = Allowance()
        self._pause, self._num_paused = _FIRST_PAUSE, 0
        self._paused_batch = (0, 0)  # requests to guess for, and all, when drafts were last found not to pay
        self._acceptance = _FIRST_ACCEPTANCE
        self._followed: dict[str, _Followed] = {}
        self._times = DraftTimes()  # of the present step, without the drafter's
        self._drafter_s = 0.0

    def _measure_anew(self) -> None:
        """Forget all times."""
        self._plain_times = PlainTimes()
        self._verifying_times = StepTimes()  # of steps with drafts, by number of rows
        self._depth_times = StepTimes()  # of the drafter, for one token of each guess, by number of guesses
        self._pace = Pace()  # all times are divided by it

    @property
    def layers_read(self) -> tuple[int, ...]:
        """Layers whose inputs (hidden states) the drafter reads; empty = it reads none."""
        return () if self._reader is None else self._reader.layers

    @property
    def carrier(self) -> StateCarrier | None:
        """The drafter, if its states can go on at another worker."""
        return self._drafter if isinstance(self._drafter, StateCarrier) else None

    def observe(self, step: SchedulerOutput, first_tokens: Sequence[int], states: torch.Tensor) -> None:
        """Hand a step's hidden states to the drafter; after `begin`, before `drafts`. Arguments as
        `StateReader.observe`: each scheduled request's first row in `states` [num_tokens, len(layers_read) * hidden].
        """
        assert self._reader is not None
        began_s = self._now_s()
        self._reader.observe(step, first_tokens, states)
        self._note_cost(self._spent_s(began_s) / self._pace.factor, len(step.scheduled))

    def begin(self, step: SchedulerOutput) -> None:
        """Forget the requests that a step releases, and follow its new ones."""
        began_s = self._now_s()
        for request_id in step.released:
            if self._followed.pop(request_id, None) is not None:
                self._drafter.end(request_id)
        for request in step.new:
            if request.params.speculate != OFF:
                self._followed[request.request_id] = _Followed()
                self._drafter.begin(request)
        self._spent_s(began_s)

    def take_times(self) -> DraftTimes:
        """Returns how drafts changed the time of the last step given to `drafts`, and forgets it."""
        times = replace(self._times, drafter_s=self._drafter_s)
        self._times, self._drafter_s = DraftTimes(), 0.0
        return times

    def drafts(
        self, step: SchedulerOutput, sampled: Mapping[str, Sequence[SampledToken]], seconds: float
    ) -> Mapping[str, Sequence[int]]:
        """Drafts to verify in the next step, after one that took `seconds` and sampled `sampled`."""
        self._note_step(step, sampled, seconds)
        began_s = self._now_s()
        candidates = self._take(sampled)
        self._spent_s(began_s)
        if not candidates:
            return {}
        if not self._adapts:
            return self._guess(dict.fromkeys(candidates, self._max_drafts), len(sampled))
        if not self._allowance.is_left or not self._plain_times.is_sure(len(sampled)):
            return {}
        guesses = self._guess(self._limits(candidates, len(sampled)), len(sampled))
        if not guesses:
            return {}
        num_other_rows = sum(item.num_tokens for item in step.scheduled if not item.samples)
        num_rows = len(sampled) + num_other_rows
        lengths = self._lengths({name: len(guess) for name, guess in guesses.items()}, num_rows)
        if not self._pace.is_usual and self._verifying_times.count(num_rows + sum(lengths.values())) < NUM_SURE:
            return {}  # NOTE: at what pace a new number of rows is measured would not be known
        return {request_id: guesses[request_id][:length] for request_id, length in lengths.items()}

    def _note_step(self, step: SchedulerOutput, sampled: Mapping[str, Sequence[SampledToken]], seconds: float) -> None:
        """Record a step's time, and what its drafts gained."""
        num_drafts = sum(item.num_drafts for item in step.scheduled)
        num_requests = len(step.scheduled)
        is_decode = step.num_tokens == num_requests + num_drafts
        self._allowance.note_step()
        self._depth_times.pass_step()
        if is_decode and num_drafts:
            self._plain_times.pass_step(num_requests)
            self._note_verifying(step.num_tokens, num_requests, sum(map(len, sampled.values())), seconds)
            self._note_times(step.num_tokens, num_requests, seconds)
            return
        self._verifying_times.pass_step()
        if is_decode:
            self._plain_times.note(num_requests, self._at_pace(seconds, self._plain_times.seconds(num_requests)))
        else:
            self._plain_times.pass_step(num_requests)

    def _note_times(self, num_rows: int, num_requests: int, seconds: float) -> None:
        """Compare a step with drafts with one without, by their usual times at the present pace."""
        plain_s = self._plain_times.seconds(num_requests)
        if isinf(plain_s):
            return
        is_sure = self._verifying_times.count(num_rows) >= NUM_SURE
        usual_s = self._verifying_times.measured(num_rows) if is_sure else None
        step_s = seconds if usual_s is None else usual_s * self._pace.factor
        self._times = DraftTimes(plain_s=plain_s * self._pace.factor, step_s=step_s)

    def _at_pace(self, seconds: float, usual_s: float) -> float:
        """Time that a step of `seconds` would have taken at the usual pace; records its pace."""
        if not isinf(usual_s):
            self._pace.note(seconds / usual_s)
            if self._pace.lasts:
                self._measure_anew()
        return seconds / self._pace.factor

    def _note_verifying(self, num_rows: int, num_requests: int, num_tokens: int, seconds: float) -> None:
        """Record a step with drafts. One that other work disturbed counts as little more than is usual."""
        seconds = self._at_pace(seconds, self._verifying_times.measured(num_rows) or inf)
        times, plain_s = self._verifying_times, self._plain_times.seconds(num_requests)
        times.note(num_rows, seconds)
        if times.count(num_rows) == 1:
            self._plain_times.doubt(num_requests)  # NOTE: so both are measured at one pace
        if isinf(plain_s):
            return
        most_s = (times.measured(num_rows) or seconds) + _MOST_UNUSUAL * plain_s
        if times.count(num_rows) < NUM_SURE:
            most_s = plain_s * num_rows / num_requests  # NOTE: as long with a step for each row
        lost = min(seconds, most_s) / plain_s
        self._allowance.note_gain(num_tokens / num_requests - lost)

    def _take(self, sampled: Mapping[str, Sequence[SampledToken]]) -> list[str]:
        """Give the drafter the new tokens; returns the requests for which it may draft."""
        candidates = []
        for request_id, tokens in sampled.items():
            followed = self._followed.get(request_id)
            if followed is not None and tokens[-1].is_token:
                token_ids = [token.token_id for token in tokens]
                self._judge(followed, token_ids)
                followed.guess = ()
                self._drafter.extend(request_id, token_ids)
                candidates.append(request_id)
        return candidates

    def _limits(self, candidates: Sequence[str], num_requests: int) -> Mapping[str, int]:
        """Number of tokens to guess for each request: all that are allowed if guessing costs next to nothing, few if
        its cost was never measured, else as many as are worth verifying. A drafter that does not pay is tried again
        after longer and longer pauses, in which that is not calculated anew while the batch has as many requests.
        """
        batch = len(candidates), num_requests
        if batch == self._paused_batch and 0 < self._num_paused < self._pause - 1:
            self._num_paused += 1
            return {}
        wanted = dict.fromkeys(candidates, self._max_drafts)
        known_s = self._depth_times.seconds(len(candidates))
        if isinf(known_s) and self._depth_times.measured(len(candidates)) is None:
            return dict.fromkeys(candidates, min(_FIRST_DRAFTS, self._max_drafts))
        depth_s = known_s if isfinite(known_s) else 0.0
        if depth_s * self._max_drafts <= _CHEAP_SHARE * self._plain_times.seconds(num_requests):
            return wanted
        worthwhile = self._lengths(wanted, num_requests, depth_s)
        if worthwhile:
            self._pause, self._num_paused = _FIRST_PAUSE, 0
            return worthwhile
        self._num_paused += 1
        if self._num_paused < self._pause:
            self._paused_batch = batch
            return {}
        self._pause, self._num_paused = min(2 * self._pause, _LONGEST_PAUSE), 0
        return dict.fromkeys(candidates, 1)

    def _guess(self, limits: Mapping[str, int], num_requests: int) -> Mapping[str, Sequence[int]]:
        if not limits:
            return {}
        began_s = self._now_s()
        guesses = self._drafter.draft(limits)
        seconds = self._spent_s(began_s) / self._pace.factor
        depth = max(map(len, guesses.values()), default=0)
        usual_s = 0.0
        if depth:
            self._depth_times.note(len(limits), seconds / depth)
            usual_s = depth * (self._depth_times.measured(len(limits)) or 0.0)
        self._note_cost(seconds, num_requests, usual_s)
        for request_id, guess in guesses.items():
            self._followed[request_id].guess = guess
        return guesses

    def _spent_s(self, began_s: float) -> float:
        """Seconds since `began_s`, added to the drafter's time in this step."""
        seconds = self._now_s() - began_s
        self._drafter_s += seconds
        return seconds

    def _note_cost(self, seconds: float, num_requests: int, usual_s: float = 0.0) -> None:
        """Take time that the drafter used off the allowance. `usual_s`: what it usually takes."""
        plain_s = self._plain_times.seconds(num_requests)
        if not isinf(plain_s):
            self._allowance.note_gain(-min(seconds, usual_s + _MOST_UNUSUAL * plain_s) / plain_s)

    def _lengths(self, sizes: Mapping[str, int], num_rows: int, depth_s: float = 0.0) -> Mapping[str, int]:
        """Number of drafts to verify of guesses of these sizes; requests that should have none are left out."""
        plain_s = self._plain_times.seconds(num_rows)
        guesses = [Guess(size, self._acceptance_of(request_id)) for request_id, size in sizes.items()]
        lengths = choose_lengths(guesses, num_rows, self._verifying_times.curve((num_rows, plain_s)), depth_s)
        return {request_id: length for request_id, length in zip(sizes, lengths, strict=True) if length}

    def _judge(self, followed: _Followed, token_ids: Sequence[int]) -> None:
        """Compare the latest drafts with the tokens that came."""
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
