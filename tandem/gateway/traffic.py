"""Traffic of a gateway in one span of time: counts, and histograms of durations in steps of ten percent.

Invariant: its size is bounded; a percentile is off by five percent at most.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

_STEP = math.log(1.1)  # width of a histogram step, as a logarithm
_SHORTEST_S = 1e-5
_LONGEST_S = 1e4
_SHARES = (50, 95, 99)  # percentiles that are reported


@dataclass(slots=True)
class TrafficCounts:
    """Counts of a gateway's traffic in `seconds` seconds.

    Args:
        num_asked: choices that arrived, plus requests refused before that: the denominator of error rates.
        num_refused: requests answered with an error that is the client's, or because of a lack of capacity.
        num_failed: requests answered with an error of the server's.
        num_finished_tokens: prompt tokens of choices that a worker finished.
        num_cached_tokens: of those, the tokens that needed no prefill.
        first_token, per_token: histograms of durations, by step.
    """

    seconds: float = 0.0
    num_arrived: int = 0
    num_asked: int = 0
    num_refused: int = 0
    num_failed: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_finished_tokens: int = 0
    num_cached_tokens: int = 0
    first_token: Counter[int] = field(default_factory=Counter)
    per_token: Counter[int] = field(default_factory=Counter)

    def add(self, other: "TrafficCounts") -> None:
        """Adds the counts of `other`."""
        for each in fields(self):
            mine, theirs = getattr(self, each.name), getattr(other, each.name)
            setattr(self, each.name, mine + theirs)

    @classmethod
    def sum(cls, many: Iterable["TrafficCounts"]) -> "TrafficCounts":
        """The sum of many counts."""
        total = cls()
        for each in many:
            total.add(each)
        return total

    def figures(self) -> Mapping[str, Any]:
        """Rates, shares (0 to 1) and percentiles; shares and percentiles of nothing are None."""
        return {
            "requests_per_s": self._per_s(self.num_arrived),
            "prompt_tokens_per_s": self._per_s(self.num_prompt_tokens),
            "output_tokens_per_s": self._per_s(self.num_output_tokens),
            "failed_share": _share(self.num_failed, self.num_asked),
            "refused_share": _share(self.num_refused, self.num_asked),
            "cached_share": _share(self.num_cached_tokens, self.num_finished_tokens),
            "ttft_ms": _percentiles_ms(self.first_token),
            "tpot_ms": _percentiles_ms(self.per_token),
        }

    def _per_s(self, count: int) -> float:
        return round(count / self.seconds, 2) if self.seconds else 0.0


def step_of(duration_s: float) -> int:
    """The histogram step of a duration."""
    return math.floor(math.log(min(max(duration_s, _SHORTEST_S), _LONGEST_S)) / _STEP)


def _share(part: int, whole: int) -> float | None:
    return round(min(1.0, part / whole), 4) if whole else None


def _percentiles_ms(counts: Mapping[int, int]) -> Mapping[str, float | None]:
    return {f"p{share}": _percentile_ms(counts, share) for share in _SHARES}


def _percentile_ms(counts: Mapping[int, int], share: int) -> float | None:
    """The middle of the step that holds the `share`-th percentile, in milliseconds."""
    left = sum(counts.values()) * share / 100
    for step in sorted(counts):
        left -= counts[step]
        if left <= 0:
            return round(1000 * math.exp((step + 0.5) * _STEP), 3)
    return None
