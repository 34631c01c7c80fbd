"""Calibration of speed models: coefficients per kind of worker, learned online from the times workers measure.

Weighted least squares on relative errors, with non-negative coefficients and exponential forgetting, which is faster
while errors keep the same sign. A weak prior fixes the proportions that the samples do not determine, at the scale of
the samples. A worker's first samples (compilation, cold caches) are dropped, and outliers are weighted less the
further they are from the usual error.
"""

import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from tandem.core.errors import InvalidRequestError
from tandem.routing.least_squares import Matrix, Vector, solve_nonnegative
from tandem.routing.measurement import require_measurement
from tandem.routing.speed import DecodeSpeed, PrefillSpeed, PrefillWork, Speed

_MAX_WORKERS = 65_536  # whose warm-up samples are counted


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationSettings:
    """Settings of the calibration.

    Args:
        memory: approximate number of recent samples that count.
        num_warmup: first samples of a worker, which are dropped.
        prior_weight: weight of the prior, in samples.
        outlier: an error larger than this multiple of the usual error is scaled down to that multiple.
    """

    memory: float = 64.0
    num_warmup: int = 3
    prior_weight: float = 0.02
    outlier: float = 3.0


@dataclass(frozen=True, slots=True)
class FitError:
    """Error of predictions relative to the larger of measured and predicted time, each taken before its sample was
    learned from; exponential averages. `mean`: above 0 where measured times were longer.
    """

    num_samples: int = 0
    mean: float = 0.0
    mean_absolute: float = 0.0


class Fit:
    """Fit of a linear model's three coefficients, solved for their ratios to the prior so that all have one scale."""

    def __init__(self, prior: Vector, settings: CalibrationSettings) -> None:
        if len(prior) != 3 or not all(math.isfinite(value) and value > 0 for value in prior):
            raise InvalidRequestError(f"prior={prior} cannot start a calibration; three finite values above zero do")
        self._prior = prior
        self._settings = settings
        self._ratios: Vector = (1.0, 1.0, 1.0)
        self._products: Matrix = ((0.0,) * 3,) * 3
        self._targets: Vector = (0.0,) * 3
        self._usual_error = 0.1
        self._drift = 0.0
        self.error = FitError()

    @property
    def coefficients(self) -> Vector:
        return tuple(ratio * prior for ratio, prior in zip(self._ratios, self._prior, strict=True))

    def observe(self, features: Vector, measured_ms: float) -> None:
        """Learn from one measurement.

        Raises:
            InvalidRequestError: the measurement or a feature is out of range.
        """
        require_measurement(features, measured_ms)
        parts = tuple(prior * value for prior, value in zip(self._prior, features, strict=True))
        predicted_ms = sum(ratio * part for ratio, part in zip(self._ratios, parts, strict=True))
        scale_ms = max(predicted_ms, measured_ms)
        relative = (measured_ms - predicted_ms) / scale_ms
        self._learn(tuple(part / scale_ms for part in parts), measured_ms / scale_ms, self._weight(relative))
        self._record(relative)

    def _weight(self, relative: float) -> float:
        tolerated = self._settings.outlier * self._usual_error
        return 1.0 if abs(relative) <= tolerated else tolerated / abs(relative)

    def _learn(self, row: Vector, target: float, weight: float) -> None:
        keep = (1.0 - 1.0 / self._settings.memory) * (1.0 - min(0.5, self._drift**2))
        pull = self._settings.prior_weight
        self._products = tuple(
            tuple(keep * old + weight * left * right for old, right in zip(line, row, strict=True))
            for line, left in zip(self._products, row, strict=True)
        )
        self._targets = tuple(
            keep * old + weight * value * target for old, value in zip(self._targets, row, strict=True)
        )
        common = sum(self._targets) / sum(map(sum, self._products))
        pulled = tuple(
            tuple(value + pull * (i == j) for j, value in enumerate(line)) for i, line in enumerate(self._products)
        )
        self._ratios = solve_nonnegative(pulled, tuple(value + pull * common for value in self._targets))

    def _record(self, relative: float) -> None:
        old = self.error
        share = max(1.0 / self._settings.memory, 1.0 / (old.num_samples + 1))
        self._drift = 0.9 * self._drift + 0.1 * relative
        self._usual_error = max(0.02, 0.9 * self._usual_error + 0.1 * abs(relative))
        self.error = FitError(
            old.num_samples + 1,
            old.mean + share * (relative - old.mean),
            old.mean_absolute + share * (abs(relative) - old.mean_absolute),
        )


class Calibration:
    """Calibrated speeds by kind of worker. `priors`: initial speeds of known kinds; others start from `default`."""

    def __init__(
        self,
        default: Speed,
        priors: Mapping[str, Speed] | None = None,
        settings: CalibrationSettings | None = None,
    ) -> None:
        self._default = default
        self._priors = dict(priors or {})
        self._settings = settings or CalibrationSettings()
        self._fits: dict[str, tuple[Fit, Fit]] = {}
        self._speeds: dict[str, Speed] = {}
        self._num_seen: OrderedDict[tuple[str, str], int] = OrderedDict()

    def speed(self, kind: str) -> Speed:
        """Returns the current estimate; the same object until a sample of this kind arrives."""
        found = self._speeds.get(kind)
        return found if found is not None else self._priors.get(kind, self._default)

    def observe_prefill(self, worker_id: str, kind: str, work: PrefillWork, measured_ms: float) -> None:
        """Learn from a prefill: a worker computed `work` in `measured_ms`, time in the queue excluded."""
        if self._is_warm(worker_id, "prefill"):
            prefill, _ = self._fit(kind)
            prefill.observe((work.num_requests, work.num_tokens, work.num_pairs), measured_ms)
            self._publish(kind)

    def observe_step(
        self, worker_id: str, kind: str, num_running: int, num_context_tokens: int, measured_ms: float
    ) -> None:
        """Learn from a decode step, or from the mean of several similar ones."""
        if self._is_warm(worker_id, "decode"):
            _, decode = self._fit(kind)
            decode.observe((1.0, num_running, num_context_tokens), measured_ms)
            self._publish(kind)

    def errors(self) -> Mapping[str, tuple[FitError, FitError]]:
        """Per kind, the errors of prefill and decode predictions."""
        return {kind: (prefill.error, decode.error) for kind, (prefill, decode) in self._fits.items()}

    def forget(self, worker_id: str) -> None:
        """Remove a worker: the next one with this id starts with warm-up samples again."""
        for stage in ("prefill", "decode"):
            self._num_seen.pop((worker_id, stage), None)

    def _is_warm(self, worker_id: str, stage: str) -> bool:
        key = (worker_id, stage)
        num_seen = self._num_seen.get(key, 0)
        if num_seen < self._settings.num_warmup:
            self._num_seen[key] = num_seen + 1
            if len(self._num_seen) > _MAX_WORKERS:
                self._num_seen.popitem(last=False)
        return num_seen >= self._settings.num_warmup

    def _fit(self, kind: str) -> tuple[Fit, Fit]:
        fits = self._fits.get(kind)
        if fits is None:
            prior = self.speed(kind)
            prefill, decode = prior.prefill, prior.decode
            fits = self._fits[kind] = (
                Fit((prefill.ms_per_request, prefill.ms_per_token, prefill.ms_per_pair), self._settings),
                Fit((decode.ms_per_step, decode.ms_per_request, decode.ms_per_context_token), self._settings),
            )
        return fits

    def _publish(self, kind: str) -> None:
        prefill, decode = self._fits[kind]
        self._speeds[kind] = Speed(PrefillSpeed(*prefill.coefficients), DecodeSpeed(*decode.coefficients))
