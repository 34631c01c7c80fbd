"""Traffic of the last minute, second by second, and of the last hour, minute by minute.

Invariant: memory is bounded whatever the load: at most 121 spans of a few hundred numbers, less than 4 MiB. A second is
added to its minute once it has passed. Owned by one event loop.
"""

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.core.clock import Clock, SystemClock
from tandem.gateway.traffic import TrafficCounts, step_of

NUM_SECONDS = 60
NUM_MINUTES = 60
MINUTE_S = 60
_SERIES = {
    "requests_per_s": ("requests_per_s",),
    "output_tokens_per_s": ("output_tokens_per_s",),
    "failed_share": ("failed_share",),
    "cached_share": ("cached_share",),
    "ttft_p50_ms": ("ttft_ms", "p50"),
    "tpot_p50_ms": ("tpot_ms", "p50"),
}


@dataclass(slots=True)
class _Span:
    """A second or a minute. `number`: its index since the clock's zero."""

    number: int
    traffic: TrafficCounts


class RecentTraffic:
    """Traffic of the last minute and, in less detail, the last hour; receives what `GatewayMetrics` observes."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._started = math.floor(self._clock.now_s())
        self._seconds: deque[_Span] = deque(maxlen=NUM_SECONDS + 1)
        self._minutes: deque[_Span] = deque(maxlen=NUM_MINUTES + 1)

    def note_arrival(self, num_prompt_tokens: int) -> None:
        """Records a choice that is about to be paired with workers."""
        now = self._now()
        now.num_arrived += 1
        now.num_asked += 1
        now.num_prompt_tokens += num_prompt_tokens

    def note_first(self, ttft_s: float) -> None:
        """Records a choice's first token, `ttft_s` seconds after its request arrived."""
        now = self._now()
        now.num_output_tokens += 1
        now.first_token[step_of(ttft_s)] += 1

    def note_tokens(self, num_tokens: int, gap_s: float) -> None:
        """Records tokens that arrived together, `gap_s` seconds after the previous ones, as evenly spaced."""
        now = self._now()
        now.num_output_tokens += num_tokens
        now.per_token[step_of(gap_s / num_tokens)] += num_tokens

    def note_prompt(self, num_tokens: int, num_cached_tokens: int) -> None:
        """Records a choice that a worker finished; `num_cached_tokens` of its prompt needed no prefill."""
        now = self._now()
        now.num_finished_tokens += num_tokens
        now.num_cached_tokens += num_cached_tokens

    def note_error(self, *, is_ours: bool, has_arrived: bool) -> None:
        """Records a request answered with an error. `is_ours`: the server's; `has_arrived`: its choices were
        recorded.
        """
        now = self._now()
        now.num_failed += is_ours
        now.num_refused += not is_ours
        now.num_asked += not has_arrived

    def as_json(self) -> Mapping[str, Any]:
        """The last minute, in whole seconds."""
        self._now()
        end = math.floor(self._clock.now_s())
        known = {span.number: span.traffic for span in self._seconds}
        numbers = range(max(end - NUM_SECONDS, self._started), end)
        return _told([known.get(number) or TrafficCounts(1.0) for number in numbers], 1)

    def hour_as_json(self) -> Mapping[str, Any]:
        """The last hour in minutes; the current minute has the seconds that have passed."""
        self._now()
        return _told(list(self._past_minutes()), MINUTE_S)

    def _past_minutes(self) -> Iterator[TrafficCounts]:
        end = math.floor(self._clock.now_s())
        known = {span.number: span.traffic for span in self._minutes}
        last = (end - 1) // MINUTE_S  # NOTE: of the last second that is over
        for number in range(max(last - NUM_MINUTES + 1, self._started // MINUTE_S), last + 1):
            begin_s = max(number * MINUTE_S, self._started)
            minute = TrafficCounts(float(min(number * MINUTE_S + MINUTE_S, end) - begin_s))
            if number in known:
                minute.add(known[number])
            if minute.seconds:
                yield minute

    def _now(self) -> TrafficCounts:
        """Counts of the current second."""
        number = math.floor(self._clock.now_s())
        if not self._seconds or self._seconds[-1].number != number:
            if self._seconds:
                self._add_to_minute(self._seconds[-1])
            self._seconds.append(_Span(number, TrafficCounts(1.0)))
        return self._seconds[-1].traffic

    def _add_to_minute(self, second: _Span) -> None:
        """NOTE: a minute's length follows from the clock, since quiet seconds are never added."""
        number = second.number // MINUTE_S
        if not self._minutes or self._minutes[-1].number != number:
            self._minutes.append(_Span(number, TrafficCounts()))
        minute = self._minutes[-1].traffic
        seconds = minute.seconds
        minute.add(second.traffic)
        minute.seconds = seconds


def _told(spans: Sequence[TrafficCounts], step_s: int) -> Mapping[str, Any]:
    """Figures over all spans, and time series of one value for each span, oldest first."""
    total = TrafficCounts.sum(spans)
    each = [span.figures() for span in spans]
    return {
        "window_s": round(total.seconds),
        "step_s": step_s,
        "num_requests": total.num_arrived,
        "num_failed": total.num_failed,
        "num_refused": total.num_refused,
        **total.figures(),
        "series": {name: [_at(figures, path) for figures in each] for name, path in _SERIES.items()},
    }


def _at(figures: Mapping[str, Any], path: Sequence[str]) -> float | None:
    found: Any = figures
    for name in path:
        found = found[name]
    value: float | None = found
    return value
