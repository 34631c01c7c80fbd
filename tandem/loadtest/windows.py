"""Time series of a load test: counts, rates and latencies of each window of time. Pure.

Latencies belong to the window in which a request was due; tokens and ends to the window in which they occurred.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.loadtest.outcome import RequestOutcome
from tandem.workload.slo import Percentiles, percentiles

MAX_WINDOWS = 2000  # of one test; windows of longer tests are wider


@dataclass(frozen=True, slots=True)
class ReportWindow:
    """A window that begins at `at_s`; all have one width. `num_open`: at its end. Latencies are None if unknown."""

    at_s: float
    num_due: int
    num_completed: int
    num_refused: int
    num_failed: int
    num_open: int
    output_tokens_per_s: float
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    tpot_p50_s: float | None
    tpot_p99_s: float | None


def windows(outcomes: Sequence[RequestOutcome], width_s: float, duration_s: float) -> tuple[float, list[ReportWindow]]:
    """The width, increased for long tests, and the windows from zero to `duration_s`.

    Requests of the warm-up load the server too: their tokens and ends are included, their latencies are not.
    """
    width_s = max(width_s, duration_s / MAX_WINDOWS)
    count = max(1, math.ceil(duration_s / width_s))
    tally = _Tally(outcomes, width_s, count, duration_s)
    return width_s, [tally.window(index) for index in range(count)]


class _Tally:
    """Sorts all outcomes into windows, once, and evaluates windows one after the other.

    Args:
        num_windows, end_s: number of windows, and the end of the last one.
    """

    def __init__(self, outcomes: Sequence[RequestOutcome], width_s: float, num_windows: int, end_s: float) -> None:
        self._width_s = width_s
        self._last = num_windows - 1
        self._end_s = end_s
        self._due: dict[int, list[RequestOutcome]] = {}
        self._ended: dict[int, list[RequestOutcome]] = {}
        self._tokens: Counter[int] = Counter()
        self._opened: Counter[int] = Counter()
        for outcome in outcomes:
            self._due.setdefault(self._index(outcome.due_s), []).append(outcome)
            self._ended.setdefault(self._index(outcome.ended_s), []).append(outcome)
            self._opened[self._index(outcome.sent_s)] += 1
            self._opened[self._index(outcome.ended_s)] -= 1
            for at_s, num_tokens in zip(outcome.event_times_s, outcome.event_tokens, strict=True):
                self._tokens[self._index(at_s)] += num_tokens
        self._num_open = sum(change for index, change in self._opened.items() if index < 0)

    def window(self, index: int) -> ReportWindow:
        """The window of this index; call for each index once, in order."""
        due = self._due.get(index, [])
        ended = [outcome for outcome in self._ended.get(index, []) if not outcome.is_unfinished]
        refused = [outcome for outcome in ended if outcome.failure is not None and outcome.failure.is_refusal]
        completed = sum(outcome.failure is None for outcome in ended)
        self._num_open += self._opened[index]
        ttft = percentiles([one.ttft_s for one in map(RequestOutcome.served, due) if one.ttft_s is not None])
        tpot = percentiles([one.tpot_s for one in map(RequestOutcome.served, due) if one.tpot_s is not None])
        return ReportWindow(
            at_s=round(index * self._width_s, 6),
            num_due=len(due),
            num_completed=completed,
            num_refused=len(refused),
            num_failed=len(ended) - completed - len(refused),
            num_open=self._num_open,
            output_tokens_per_s=self._tokens[index] / self._width_s,
            ttft_p50_s=_p50(ttft),
            ttft_p99_s=_p99(ttft),
            tpot_p50_s=_p50(tpot),
            tpot_p99_s=_p99(tpot),
        )

    def _index(self, at_s: float) -> int:
        """NOTE: the last window includes its end, since the last answer ends there."""
        index = math.floor(at_s / self._width_s)
        return min(index, self._last) if at_s <= self._end_s else index


def _p50(found: Percentiles | None) -> float | None:
    return None if found is None else found.p50


def _p99(found: Percentiles | None) -> float | None:
    return None if found is None else found.p99
