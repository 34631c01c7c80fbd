"""Cumulative histogram as in Prometheus: for each bound the number of measurements up to it, and their sum.

Values only. The difference of two histograms contains the measurements made between them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from tandem.core.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class Distribution:
    """`counts[i]` measurements were at most `bounds[i]`; the last bound is infinite. `total`: sum of all measurements.

    Raises:
        InvalidRequestError: bounds or counts decrease, or the last bound is finite.
    """

    bounds: tuple[float, ...] = ()
    counts: tuple[float, ...] = ()
    total: float = 0.0

    def __post_init__(self) -> None:
        is_ordered = all(low < high for low, high in pairwise(self.bounds))
        is_cumulative = all(low <= high for low, high in pairwise(self.counts)) and min(self.counts, default=0.0) >= 0
        is_closed = not self.bounds or self.bounds[-1] == math.inf
        if len(self.bounds) != len(self.counts) or not (is_ordered and is_cumulative and is_closed):
            raise InvalidRequestError("a histogram's buckets are not cumulative up to +Inf")

    @property
    def num_samples(self) -> float:
        return self.counts[-1] if self.counts else 0.0

    @property
    def mean(self) -> float | None:
        """Mean of the measurements; None if there are none."""
        return self.total / self.num_samples if self.num_samples else None

    def quantile(self, share: float) -> float | None:
        """Value that `share` of the measurements do not exceed, interpolated linearly in its bucket.

        At most the last finite bound; None if there are no measurements.
        """
        target = share * self.num_samples
        if not self.num_samples:
            return None
        low, num_below = 0.0, 0.0
        for bound, count in zip(self.bounds, self.counts, strict=True):
            if count >= target and count > num_below:
                return low if bound == math.inf else low + (bound - low) * (target - num_below) / (count - num_below)
            low, num_below = bound, count
        return low

    def since(self, earlier: Distribution) -> Distribution:
        """Measurements after `earlier`; all of them if the buckets differ or counting restarted."""
        if self.bounds != earlier.bounds or self.num_samples < earlier.num_samples:
            return self
        counts = [late - early for late, early in zip(self.counts, earlier.counts, strict=True)]
        return Distribution(self.bounds, _cumulative(counts), max(0.0, self.total - earlier.total))

    def scaled(self, factor: float) -> Distribution:
        return Distribution(self.bounds, tuple(count * factor for count in self.counts), self.total * factor)

    def __add__(self, other: Distribution) -> Distribution:
        """Sum of both. If the buckets differ (two versions), the one with more measurements is returned."""
        if self.bounds != other.bounds:
            return self if self.num_samples >= other.num_samples else other
        counts = tuple(left + right for left, right in zip(self.counts, other.counts, strict=True))
        return Distribution(self.bounds, counts, self.total + other.total)


NOTHING = Distribution()


def _cumulative(counts: Sequence[float]) -> tuple[float, ...]:
    """Returns the running maximum. NOTE: a scrape may see a half-updated histogram, whose difference then decreases."""
    most, found = 0.0, []
    for count in counts:
        most = max(most, count)
        found.append(most)
    return tuple(found)
