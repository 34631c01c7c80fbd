"""Draft lengths: how many of each request's guesses the next step checks, so that tokens per second are most.

`choose_lengths` is pure. `StepTimes` measures what it needs: the seconds of a step by its number of rows, one a token.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

MIN_GAIN = 1.03  # expected; less is not worth what the estimates may be wrong by
_NUM_TIMES = 5
_STALE_STEPS = 256  # after so many steps without a measurement a number of rows is tried again
_EXACT_ROWS = 16
_UNKNOWN = float("inf")


class Guess(NamedTuple):
    """One request's guesses: their number, and the probability that each is right if all before it are."""

    num_tokens: int
    acceptance: float


def choose_lengths(guesses: Sequence[Guess], num_rows: int, seconds: Callable[[int], float]) -> list[int]:
    """Number of tokens of each guess to check in a step of `num_rows` rows without drafts.

    A row that must be computed counts as one token, a draft as its probability of being accepted. Drafts are added in
    order of that, and as many are taken as give the most tokens per second; none unless that is `MIN_GAIN` times as
    many as without.

    Args:
        seconds: of a step by its number of rows.
    """
    ranked = sorted(
        (guess.acceptance ** (place + 1), -index)
        for index, guess in enumerate(guesses)
        for place in range(guess.num_tokens)
    )[::-1]
    lengths = [0] * len(guesses)
    best_rate, num_best = MIN_GAIN * num_rows / seconds(num_rows), 0
    num_tokens = float(num_rows)
    for count, (probability, _) in enumerate(ranked, 1):
        num_tokens += probability
        rate = num_tokens / seconds(num_rows + count)
        if rate > best_rate:
            best_rate, num_best = rate, count
    for _, index in ranked[:num_best]:
        lengths[-index] += 1
    return lengths


@dataclass(slots=True)
class _Times:
    last_step: int = 0
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_TIMES))


class StepTimes:
    """Seconds of recent steps by their number of rows, each the median of a few.

    Between two numbers that were measured time is taken to grow in proportion. One beyond all measured, but at most
    twice that, is taken to cost no more than the largest measured: so it is tried, and measured.
    """

    def __init__(self) -> None:
        self._times: dict[int, _Times] = {}
        self._medians: list[tuple[int, float]] = []
        self._step = 0

    def note(self, num_rows: int, seconds: float) -> None:
        """Record a step."""
        self._step += 1
        times = self._times.setdefault(_rounded(num_rows), _Times())
        times.last_step = self._step
        times.seconds.append(seconds)
        self._times = {rows: kept for rows, kept in self._times.items() if self._step - kept.last_step < _STALE_STEPS}
        self._medians = sorted((rows, median(kept.seconds)) for rows, kept in self._times.items())

    def seconds(self, num_rows: int) -> float:
        """Seconds of a step of `num_rows` rows; infinite if unknown."""
        rows = _rounded(num_rows)
        above = next((index for index, (known, _) in enumerate(self._medians) if known >= rows), None)
        if above is None:
            last = self._medians[-1] if self._medians else (0, _UNKNOWN)
            return last[1] if rows <= 2 * last[0] + _EXACT_ROWS // 2 else _UNKNOWN
        upper_rows, upper_s = self._medians[above]
        if above == 0:
            return upper_s
        lower_rows, lower_s = self._medians[above - 1]
        return lower_s + (upper_s - lower_s) * (rows - lower_rows) / (upper_rows - lower_rows)


def _rounded(num_rows: int) -> int:
    """To four significant bits: numbers of rows that are close are measured as one."""
    shift = max(0, num_rows.bit_length() - _EXACT_ROWS.bit_length())
    return num_rows >> shift << shift
