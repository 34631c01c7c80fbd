"""Forecast of demand within a short horizon, from its level, its trend and the errors of past forecasts.

Deterministic; keeps a bounded history. `upper` is deliberately high: it is the demand that the pools must sustain.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tandem.core.errors import ConfigurationError

_DOUBT = 6.0  # NOTE: a slope that explains six times the noise is halved
_MOST_GAIN = 1.5  # NOTE: limit within one horizon; a jump in the trend's window looks like a steep ramp for a while


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastSettings:
    """Settings of a forecast. Times in seconds.

    Args:
        memory_s: length of the history.
        level_s: window of the mean that is the level; queues absorb shorter bursts.
        quick_s: window of the mean that detects a jump.
        trend_s: window over which the trend is fitted.
        share: share of past forecast errors that the margin covers.
        prior_rise: relative margin per minute of horizon while the history is short.
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
    """Forecast. level: demand now. mean: at the horizon if the trend continues. upper: upper bound until then."""

    level: float
    mean: float
    upper: float


@dataclass(frozen=True, slots=True)
class _Sample:
    """One window: its end, its duration, its mean demand, and the level and trend estimated at its end."""

    at_s: float
    duration_s: float
    value: float
    level: float = 0.0
    slope: float = 0.0

    def mean(self, horizon_s: float) -> float:
        """Level at the horizon if the trend continues, at most `_MOST_GAIN` times the level."""
        return max(0.0, min(_MOST_GAIN * self.level, self.level + self.slope * horizon_s))


class Forecast:
    """Forecast of one series. Call `observe` for windows in order, `expect` for any horizon."""

    def __init__(self, settings: ForecastSettings | None = None) -> None:
        self._settings = settings or ForecastSettings()
        self._samples: deque[_Sample] = deque()

    def observe(self, at_s: float, duration_s: float, value: float) -> None:
        """Add a window that ended at `at_s`; ignored if it does not end after the last one or has no duration."""
        if duration_s <= 0 or (self._samples and at_s <= self._samples[-1].at_s):
            return
        self._samples.append(_Sample(at_s, duration_s, value))
        self._samples[-1] = replace(self._samples[-1], level=self._mean(self._settings.level_s), slope=self._slope())
        while self._samples[0].at_s < at_s - self._settings.memory_s:
            self._samples.popleft()

    def expect(self, horizon_s: float) -> ExpectedDemand:
        """Returns the forecast; zero before the first observation."""
        if not self._samples:
            return ExpectedDemand(0.0, 0.0, 0.0)
        now = replace(self._samples[-1], level=self._level())
        mean = now.mean(horizon_s)
        return ExpectedDemand(now.level, mean, mean + self._margin(horizon_s, mean))

    def _level(self) -> float:
        """Mean over `level_s`, or over `quick_s` after a jump up."""
        level, quick = self._mean(self._settings.level_s), self._mean(self._settings.quick_s)
        return quick if quick > level + 3 * self._noise(self._settings.quick_s) else level

    def _mean(self, span_s: float) -> float:
        """Mean demand of the windows that ended within the last `span_s`."""
        oldest_s = self._samples[-1].at_s - span_s
        total = length_s = 0.0
        for sample in reversed(self._samples):
            if sample.at_s <= oldest_s:
                break
            total += sample.value * sample.duration_s
            length_s += sample.duration_s
        return total / length_s

    def _noise(self, span_s: float | None = None) -> float:
        """Standard deviation of means over `span_s` (default: `level_s`) around the level."""
        span_s = span_s or self._settings.level_s
        squares = weight_s = 0.0
        for sample in self._samples:
            squares += sample.duration_s**2 * (sample.value - sample.level) ** 2
            weight_s += sample.duration_s
        if len(self._samples) < 2:
            return self._samples[-1].level * self._settings.prior_rise
        return math.sqrt(squares / weight_s / span_s)

    def _slope(self) -> float:
        """Slope per second by least squares, shrunk towards zero in proportion to the noise."""
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
        """Margin over `mean`: the quantile `share` of past forecast errors, mixed with the prior while they are few."""
        prior = self._settings.prior_rise * max(1.0, horizon_s / 60) * mean
        errors = sorted(_errors(list(self._samples), horizon_s))
        if not errors:
            return prior
        known = min(1.0, len(errors) / 30)
        found = errors[max(0, math.ceil(self._settings.share * len(errors)) - 1)]
        return known * max(0.0, found) + (1 - known) * prior


def _errors(samples: Sequence[_Sample], horizon_s: float) -> list[float]:
    """Actual minus forecast demand, for every past moment whose horizon has passed with observations in it.

    Actual demand is the mean of the horizon's second half, when a replica requested at that moment would serve. Errors
    are absolute: relative errors of a quiet hour would demand too much in a busy one.
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
