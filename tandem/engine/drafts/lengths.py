"""Draft lengths: how many of each request's guesses the next step checks, so that tokens per second are most.

`choose_lengths` is pure. `StepTimes` keeps what it needs: the seconds of a step by its number of rows, one a token.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

MIN_GAIN = 1.03  # expected; less is not worth what the estimates may be wrong by
MAX_SLOWDOWN = 1.03  # expected, of the request that gains least
_LEAST_PROBABILITY = 0.02  # of a draft that any batch has room for
_NUM_TIMES = 9
_STALE_STEPS = 256  # after so many steps without a measurement a number of rows is tried again
_EXACT_ROWS = 16
_UNKNOWN = float("inf")


class Guess(NamedTuple):
    """One request's guesses: their number, and the probability that each is right if all before it are."""

    num_tokens: int
    acceptance: float


def choose_lengths(
    guesses: Sequence[Guess], num_rows: int, seconds: Callable[[int], float], depth_s: float = 0.0
) -> list[int]:
    """How many tokens of each guess to check in a step of `num_rows` rows without drafts.

    A row that must be computed counts as one token, a draft as its probability of being accepted. Drafts are added in
    order of that, and as many are taken as give the most tokens per second; none unless that is `MIN_GAIN` times as
    many as without. No row may come to less than 1 / `MAX_SLOWDOWN` of its tokens per second without drafts, so that
    guessable answers are not made faster at the cost of others.

    Args:
        seconds: of a step by its number of rows.
        depth_s: seconds to make one more token of every guess; 0 where the guesses have been made.
    """
    ranked = sorted(
        (probability, -index, place)
        for index, guess in enumerate(guesses)
        for place in range(guess.num_tokens)
        if (probability := guess.acceptance ** (place + 1)) >= _LEAST_PROBABILITY
    )[::-1]
    lengths = [0] * len(guesses)
    expected = [1.0] * max(num_rows, len(guesses))  # tokens of each row
    plain_s = seconds(num_rows)
    best_rate, num_best = MIN_GAIN * num_rows / plain_s, 0
    num_tokens, depth = float(num_rows), 0
    for count, (probability, index, place) in enumerate(ranked, 1):
        num_tokens += probability
        expected[-index] += probability
        depth = max(depth, place + 1)
        step_s = seconds(num_rows + count) + depth * depth_s
        if num_tokens / step_s > best_rate and step_s <= MAX_SLOWDOWN * plain_s * min(expected):
            best_rate, num_best = num_tokens / step_s, count
    for _, index, _ in ranked[:num_best]:
        lengths[-index] += 1
    return lengths


@dataclass(slots=True)
class _Times:
    last_step: int = 0
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_TIMES))


class StepTimes:
    """Seconds of recent steps by their number of rows, each the median of a few.

    Between two numbers that were measured time is taken to grow in proportion. A few rows more than
    all measured are taken to cost no more than the largest measured: so they are tried, and measured.
    """

    def __init__(self) -> None:
        self._times: dict[int, _Times] = {}
        self._medians: list[tuple[int, float]] = []
        self._step = 0

    def note(self, num_rows: int, seconds: float) -> None:
        """Record a step."""
        self.pass_step()
        times = self._times.setdefault(_rounded(num_rows), _Times())
        times.last_step = self._step
        times.seconds.append(seconds)
        self._medians = sorted((rows, median(kept.seconds)) for rows, kept in self._times.items())

    def pass_step(self) -> None:
        """Forget what was measured long ago; another step has passed, of which nothing is recorded."""
        self._step += 1
        stale = [rows for rows, kept in self._times.items() if self._step - kept.last_step >= _STALE_STEPS]
        for rows in stale:
            del self._times[rows]
        if stale:
            self._medians = [known for known in self._medians if known[0] not in stale]

    def covers(self, num_rows: int) -> bool:
        """Whether `seconds` would answer from measurements of no fewer rows and no more."""
        return bool(self._medians) and self._medians[0][0] <= _rounded(num_rows) <= self._medians[-1][0]

    def seconds(self, num_rows: int) -> float:
        """Of a step of `num_rows` rows; infinite if unknown."""
        return self.curve()(num_rows)

    def curve(self, least: tuple[int, float] | None = None) -> Callable[[int], float]:
        """`seconds`, of what has been measured so far.

        Args:
            least: a smaller number of rows and its seconds, in place of what was measured up to there. No more rows
                take less.
        """
        medians, least_s = self._medians, 0.0
        if least is not None:
            least_rows, least_s = _rounded(least[0]), least[1]
            medians = [(least_rows, least_s), *(known for known in medians if known[0] > least_rows)]
        known_rows = [rows for rows, _ in medians]

        def seconds(num_rows: int) -> float:
            rows = _rounded(num_rows)
            above = bisect_left(known_rows, rows)
            if above == len(medians):
                last_rows, last_s = medians[-1] if medians else (0, _UNKNOWN)
                return max(least_s, last_s) if rows <= _tried_rows(last_rows) else _UNKNOWN
            upper_rows, upper_s = medians[above]
            if above == 0 or upper_rows == rows:
                return max(least_s, upper_s)
            lower_rows, lower_s = medians[above - 1]
            return max(least_s, lower_s + (upper_s - lower_s) * (rows - lower_rows) / (upper_rows - lower_rows))

        return seconds


def _tried_rows(num_rows: int) -> int:
    """Largest number that may be tried, after `num_rows`: little more, since a trial costs more than is known."""
    return num_rows + num_rows // 4 + _EXACT_ROWS // 2


def _rounded(num_rows: int) -> int:
    """To four significant bits: numbers of rows that are close are measured as one."""
    shift = max(0, num_rows.bit_length() - _EXACT_ROWS.bit_length())
    return num_rows >> shift << shift
