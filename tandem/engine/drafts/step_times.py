"""Step times: seconds of a step by its number of rows (tokens that it computes), from disturbed measurements.

Other processes make steps slower and never faster. So the usual time is the lower quartile of the recent measurements
(the minimum of up to four), and a number of rows that was measured seldom is measured again soon.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

NUM_SURE = 3  # measurements, of which one is taken to be undisturbed
_NUM_TIMES = 9
_FIRST_RETRIAL = 8  # steps until what was measured once is tried again; four times as many each time
_FIRST_PASSES = 8  # steps with drafts between two without; twice as many each time
_MOST_PASSES = 64
_STALE_STEPS = 256  # what was measured so long ago is forgotten: contexts and other work have changed
_DISPROVING = 0.67  # of what is usual: a step so fast shows that all before were disturbed
_EXACT_ROWS = 16
_UNKNOWN = inf


@dataclass(slots=True)
class _Times:
    """Recent times of steps with one number of rows. `num_passed`: steps since the last of them."""

    last_step: int = 0
    num_passed: int = 0
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_TIMES))

    @property
    def usual_s(self) -> float:
        return sorted(self.seconds)[(len(self.seconds) - 1) // 4]

    def note(self, step: int, seconds: float) -> None:
        is_stale = step - self.last_step >= _STALE_STEPS
        if is_stale or (self.seconds and seconds < _DISPROVING * self.usual_s):
            self.seconds.clear()
        self.last_step, self.num_passed = step, 0
        self.seconds.append(seconds)


class StepTimes:
    """Times of steps with drafts by number of rows, or of a drafter by number of requests.

    Times between two measured numbers of rows are interpolated. A few rows more than the largest measured number are
    assumed to cost no more than that, so that they are tried, and measured. A number that was measured once is tried
    again after 8 steps, one with two measurements after 32, and so on.
    """

    def __init__(self) -> None:
        self._times: dict[int, _Times] = {}
        self._usual: list[tuple[int, float]] = []  # of the numbers of rows that need no other trial, ascending
        self._step = 0
        self._first_trial = inf  # step from which on one of `_usual` is to be tried again

    def note(self, num_rows: int, seconds: float) -> None:
        """Record the time of a step."""
        self.pass_step()
        times = self._times.setdefault(_rounded(num_rows), _Times(self._step))
        times.note(self._step, seconds)
        self._sort()

    def pass_step(self) -> None:
        """Count a step whose time is not recorded here."""
        self._step += 1
        if self._step >= self._first_trial:
            self._sort()

    def count(self, num_rows: int) -> int:
        """Number of recent measurements of steps with this many rows."""
        times = self._times.get(_rounded(num_rows))
        return 0 if times is None else len(times.seconds)

    def measured(self, num_rows: int) -> float | None:
        """The usual time of exactly this number of rows, even if it is to be measured again; None if never measured."""
        times = self._times.get(_rounded(num_rows))
        return None if times is None else times.usual_s

    def seconds(self, num_rows: int) -> float:
        """Expected time of a step of `num_rows` rows; infinite if unknown."""
        return self.curve()(num_rows)

    def curve(self, least: tuple[int, float] | None = None) -> Callable[[int], float]:
        """The function `seconds`, as measured so far.

        Args:
            least: a smaller number of rows and its seconds, in place of what was measured up to there. No more rows
                take less.
        """
        known, least_s = self._usual, 0.0
        if least is not None:
            least_rows, least_s = _rounded(least[0]), least[1]
            known = [(least_rows, least_s), *(point for point in known if point[0] > least_rows)]
        known_rows = [rows for rows, _ in known]

        def seconds(num_rows: int) -> float:
            rows = _rounded(num_rows)
            above = bisect_left(known_rows, rows)
            if above == len(known):
                last_rows, last_s = known[-1] if known else (0, _UNKNOWN)
                return max(least_s, last_s) if rows <= _tried_rows(last_rows) else _UNKNOWN
            upper_rows, upper_s = known[above]
            if above == 0 or upper_rows == rows:
                return max(least_s, upper_s)
            lower_rows, lower_s = known[above - 1]
            return max(least_s, lower_s + (upper_s - lower_s) * (rows - lower_rows) / (upper_rows - lower_rows))

        return seconds

    def _sort(self) -> None:
        trials = {rows: times.last_step + _pause(len(times.seconds)) for rows, times in self._times.items()}
        known = sorted(rows for rows, trial in trials.items() if self._step < trial)
        self._usual = [(rows, self._times[rows].usual_s) for rows in known]
        self._first_trial = min((trials[rows] for rows in known), default=inf)


class PlainTimes:
    """Times of steps without drafts by number of requests: the baseline for what drafts gain and lose.

    A number of requests is measured until it is sure, and then once between more and more steps with drafts.
    """

    def __init__(self) -> None:
        self._times: dict[int, _Times] = {}
        self._step = 0

    def note(self, num_requests: int, seconds: float) -> None:
        """Record a step without drafts."""
        self._step += 1
        self._times.setdefault(_rounded(num_requests), _Times(self._step)).note(self._step, seconds)

    def pass_step(self, num_requests: int) -> None:
        """Count a step of so many requests whose time is not recorded here."""
        self._step += 1
        times = self._times.get(_rounded(num_requests))
        if times is not None:
            times.num_passed += 1

    def measured(self, num_requests: int) -> float | None:
        """The usual time of exactly this number of requests; None if never measured."""
        times = self._times.get(_rounded(num_requests))
        return None if times is None else times.usual_s

    def doubt(self, num_requests: int) -> None:
        """Request that steps of this number of requests are measured once more."""
        times = self._times.get(_rounded(num_requests))
        if times is not None:
            times.num_passed = _MOST_PASSES

    def is_sure(self, num_requests: int) -> bool:
        """Whether `seconds` is reliable; else a step without drafts should be run."""
        times = self._times.get(_rounded(num_requests))
        if times is None or len(times.seconds) < NUM_SURE or self._step - times.last_step >= _STALE_STEPS:
            return False
        return times.num_passed < min(_FIRST_PASSES << len(times.seconds) - NUM_SURE, _MOST_PASSES)

    def seconds(self, num_requests: int) -> float:
        """Expected time of a step of `num_requests`; infinite if unknown. More requests take no less time, and k times
        as many at most k times as long: so the times of other numbers correct one that other work disturbed.
        """
        rows = _rounded(num_requests)
        own = self._times.get(rows)
        found = _UNKNOWN if own is None else own.usual_s
        sure = [other for other, times in self._times.items() if len(times.seconds) >= NUM_SURE]
        above = min((other for other in sure if other > rows), default=None)
        below = max((other for other in sure if other < rows), default=None)
        if above is not None:
            found = min(found, self._times[above].usual_s)
        if below is not None:
            found = min(found, self._times[below].usual_s * rows / below)
        return found


def _pause(num_times: int) -> int:
    """Steps until a number of rows with so many measurements is tried again."""
    return min(_FIRST_RETRIAL << 2 * (num_times - 1), _STALE_STEPS)


def _tried_rows(num_rows: int) -> int:
    """Largest number of rows that may be tried, where `num_rows` is the largest measured so far."""
    return 2 * num_rows + 1


def _rounded(num_rows: int) -> int:
    """`num_rows` with four significant bits: close numbers of rows are measured as one."""
    shift = max(0, num_rows.bit_length() - _EXACT_ROWS.bit_length())
    return num_rows >> shift << shift
