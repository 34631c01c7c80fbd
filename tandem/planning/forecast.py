"""Forecast of demand within a short horizon: its level, its trend, and how much it has risen before.

Deterministic; remembers a bounded past. It answers high on purpose: `upper` is what the pools must bear.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tandem.core.errors import ConfigurationError

_DOUBT = 6.0  # NOTE: a slope that explains six times the noise is believed by half
_MOST_GAIN = 1.5  # NOTE: of one horizon; a jump in the trend's window looks like a steep ramp for a while


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastSettings:
    """Times in seconds.

    memory_s: how far back risings are remembered. level_s: over which the level is a mean; bursts shorter than that are
    the queue's to bear. quick_s: over which a jump is noticed. trend_s: over which a trend is fitted.
    share: of the past forecasts that the margin would have covered. prior_rise: relative margin per minute of horizon,
    while little is known.
    """

    memory_s: float = 900.0
    level_s: float = 60.0
    quick_s: float = 20.0
    trend_s: float = 300.0
    share: float = 0.9
    prior_rise: float = 0.1

    def __post_init__(self) -> None:
        if not 0 < self.quick_s <= self.level_s <= self.trend_s <= self.memory_s:
            raise ConfigurationError(f"{self}: use 0 < quick_s <= level_s <= trend_s <= memory_s")
        if not (0 < self.share < 1 and self.prior_rise >= 0):
            raise ConfigurationError(f"{self}: share must lie between 0 and 1, prior_rise be 0 or more")


@dataclass(frozen=True, slots=True)
class ExpectedDemand:
    """Demand now, what it will be at the horizon if all goes on as it does, and what it may be at most until then."""

    level: float
    mean: float
    upper: float


@dataclass(frozen=True, slots=True)
class _Sample:
    """One window: its end, its length, the mean of demand in it, and what level and trend were then."""

    at_s: float
    duration_s: float
    value: float
    level: float = 0.0
    slope: float = 0.0

    def mean(self, horizon_s: float) -> float:
        """The level at the horizon if the trend goes on, within reason."""
        return max(0.0, min(_MOST_GAIN * self.level, self.level + self.slope * horizon_s))


class Forecast:
    """One series of demand; `observe` windows in order, ask for any horizon."""

    def __init__(self, settings: ForecastSettings | None = None) -> None:
        self._settings = settings or ForecastSettings()
        self._samples: deque[_Sample] = deque()

    def observe(self, at_s: float, duration_s: float, value: float) -> None:
        """A window that ended at `at_s`. One that is not after the last is ignored, as is one without a length."""
        if duration_s <= 0 or (self._samples and at_s <= self._samples[-1].at_s):
            return
        self._samples.append(_Sample(at_s, duration_s, value))
        self._samples[-1] = replace(self._samples[-1], level=self._mean(self._settings.level_s), slope=self._slope())
        while self._samples[0].at_s < at_s - self._settings.memory_s:
            self._samples.popleft()

    def expect(self, horizon_s: float) -> ExpectedDemand:
        """Zero while nothing was observed."""
        if not self._samples:
            return ExpectedDemand(0.0, 0.0, 0.0)
        now = replace(self._samples[-1], level=self._level())
        mean = now.mean(horizon_s)
        return ExpectedDemand(now.level, mean, mean + self._margin(horizon_s, mean))

    def _level(self) -> float:
        """The mean of the last minute, or of the last seconds after a jump up."""
        level, quick = self._mean(self._settings.level_s), self._mean(self._settings.quick_s)
        return quick if quick > level + 3 * self._noise(self._settings.quick_s) else level

    def _mean(self, span_s: float) -> float:
        """Of the windows that ended within the last `span_s`."""
        oldest_s = self._samples[-1].at_s - span_s
        total = length_s = 0.0
        for sample in reversed(self._samples):
            if sample.at_s <= oldest_s:
                break
            total += sample.value * sample.duration_s
            length_s += sample.duration_s
        return total / length_s

    def _noise(self, span_s: float | None = None) -> float:
        """Standard deviation of means over `span_s` (the level's span when not told) around the level."""
        span_s = span_s or self._settings.level_s
        squares = weight_s = 0.0
        for sample in self._samples:
            squares += sample.duration_s**2 * (sample.value - sample.level) ** 2
            weight_s += sample.duration_s
        if len(self._samples) < 2:
            return self._samples[-1].level * self._settings.prior_rise
        return math.sqrt(squares / weight_s / span_s)

    def _slope(self) -> float:
        """Demand gained a second by least squares, the less of it the more it drowns in noise."""
        oldest_s = self._samples[-1].at_s - self._settings.trend_s
        recent = [sample for sample in self._samples if sample.at_s > oldest_s]
        if len(recent) < 4:
            return 0.0
        mean_s = math.fsum(sample.at_s for sample in recent) / len(recent)
        mean = math.fsum(sample.value for sample in recent) / len(recent)
        spread = math.fsum((sample.at_s - mean_s) ** 2 for sample in recent)
        slope = math.fsum((sample.at_s - mean_s) * (sample.value - mean) for sample in recent) / spread
        errors = math.fsum((sample.value - mean - slope * (sample.at_s - mean_s)) ** 2 for sample in recent)
        explained, noise = slope**2 * spread, errors / (len(recent) - 2)
        return slope * explained / (explained + _DOUBT * noise) if explained > 0 else 0.0

    def _margin(self, horizon_s: float, mean: float) -> float:
        """By how much demand has exceeded what the same forecast said, in all but few cases."""
        prior = self._settings.prior_rise * max(1.0, horizon_s / 60) * mean
        errors = sorted(_errors(list(self._samples), horizon_s))
        if not errors:
            return prior
        known = min(1.0, len(errors) / 30)
        found = errors[max(0, math.ceil(self._settings.share * len(errors)) - 1)]
        return known * max(0.0, found) + (1 - known) * prior


def _errors(samples: Sequence[_Sample], horizon_s: float) -> list[float]:
    """For every past moment with a whole horizon and an observation behind it: demand less what was expected of it.

    Demand is taken over the horizon's second half: what a replica meets that was asked for at that moment. Errors are
    absolute: relative ones of a quiet hour would call for too much in a busy one.
    """
    errors: list[float] = []
    total, first, end = 0.0, 0, 0
    for start in samples:
        if samples[-1].at_s < start.at_s + horizon_s:
            break
        while end < len(samples) and samples[end].at_s <= start.at_s + horizon_s:
            total += samples[end].level
            end += 1
        while samples[first].at_s < start.at_s + horizon_s / 2:
            total -= samples[first].level
            first += 1
        if first < end:
            errors.append(total / (end - first) - start.mean(horizon_s))
    return errors
