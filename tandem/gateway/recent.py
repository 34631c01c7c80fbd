"""The last minute as the gateway saw it, second by second: rates, and how long first and later tokens took.

Invariant: memory is bounded by the window, whatever the load. Durations are counted in steps of ten percent, so a
percentile is off by at most five. Owned by one event loop.
"""

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tandem.core.clock import Clock, SystemClock

WINDOW_S = 60
_STEP = math.log(1.1)
_SHORTEST_S = 1e-5


@dataclass(slots=True)
class _Second:
    """What happened in one second; durations by their step."""

    number: int
    num_arrived: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    first_token: Counter[int] = field(default_factory=Counter)
    per_token: Counter[int] = field(default_factory=Counter)


class Recent:
    """Takes what `GatewayMetrics` takes and remembers it for `WINDOW_S` seconds."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._started_s = self._clock.now_s()
        self._seconds: deque[_Second] = deque(maxlen=WINDOW_S + 1)

    def note_arrival(self, num_prompt_tokens: int) -> None:
        """A choice is about to be paired with workers."""
        second = self._now()
        second.num_arrived += 1
        second.num_prompt_tokens += num_prompt_tokens

    def note_first(self, ttft_s: float) -> None:
        """A choice's first token came after `ttft_s`."""
        second = self._now()
        second.num_output_tokens += 1
        second.first_token[_step(ttft_s)] += 1

    def note_tokens(self, num_tokens: int, gap_s: float) -> None:
        """Tokens that came together count as evenly spaced."""
        second = self._now()
        second.num_output_tokens += num_tokens
        second.per_token[_step(gap_s / num_tokens)] += num_tokens

    def as_json(self) -> Mapping[str, Any]:
        """Figures of the whole seconds behind us; percentiles and series are None where nothing happened."""
        past = self._past()
        window_s = len(past)
        first, later = _together(s.first_token for s in past), _together(s.per_token for s in past)
        return {
            "window_s": window_s,
            "num_requests": sum(s.num_arrived for s in past),
            "requests_per_s": _mean(s.num_arrived for s in past),
            "prompt_tokens_per_s": _mean(s.num_prompt_tokens for s in past),
            "output_tokens_per_s": _mean(s.num_output_tokens for s in past),
            "ttft_ms": {f"p{share}": _percentile_ms(first, share) for share in (50, 95, 99)},
            "tpot_ms": {f"p{share}": _percentile_ms(later, share) for share in (50, 95, 99)},
            "series": {
                "requests_per_s": [s.num_arrived for s in past],
                "output_tokens_per_s": [s.num_output_tokens for s in past],
                "ttft_p50_ms": [_percentile_ms(s.first_token, 50) for s in past],
                "tpot_p50_ms": [_percentile_ms(s.per_token, 50) for s in past],
            },
        }

    def _now(self) -> _Second:
        number = math.floor(self._clock.now_s())
        if not self._seconds or self._seconds[-1].number != number:
            self._seconds.append(_Second(number))
        return self._seconds[-1]

    def _past(self) -> Sequence[_Second]:
        """The whole seconds of the window, the quiet ones too, oldest first; the running one is not in it."""
        now = math.floor(self._clock.now_s())
        begin = max(now - WINDOW_S, math.floor(self._started_s))
        known = {second.number: second for second in self._seconds}
        return [known.get(number) or _Second(number) for number in range(begin, now)]


def _step(duration_s: float) -> int:
    return math.floor(math.log(max(duration_s, _SHORTEST_S)) / _STEP)


def _together(counts: Iterable[Mapping[int, int]]) -> Counter[int]:
    total: Counter[int] = Counter()
    for count in counts:
        total.update(count)
    return total


def _percentile_ms(counts: Mapping[int, int], share: int) -> float | None:
    """The middle of the step that holds the `share`-th percentile, milliseconds."""
    left = sum(counts.values()) * share / 100
    for step in sorted(counts):
        left -= counts[step]
        if left <= 0:
            return round(1000 * math.exp((step + 0.5) * _STEP), 3)
    return None


def _mean(values: Iterable[int]) -> float:
    """Of one value a second."""
    found = list(values)
    return round(sum(found) / len(found), 2) if found else 0.0
