"""Service level objectives: the objectives, the outcome of each request, and a report.

A rejected or failed request counts as one that missed its objectives: turning users away never improves goodput.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.core.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class Slo:
    """Objectives of one request, in seconds: time to the first token, and mean time of each further one."""

    ttft_s: float
    tpot_s: float

    def __post_init__(self) -> None:
        if not (self.ttft_s > 0 and self.tpot_s > 0):
            raise InvalidRequestError(f"{self} cannot be met; both times must be above zero")


@dataclass(frozen=True, slots=True)
class Served:
    """Outcome of one request. Times on one clock; None: not reached. `rejected`: refused before any work."""

    arrival_s: float
    first_token_s: float | None = None
    finished_s: float | None = None
    num_output_tokens: int = 0
    rejected: bool = False

    @property
    def completed(self) -> bool:
        return self.finished_s is not None and self.first_token_s is not None and not self.rejected

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time of each token after the first; None when there is none."""
        if self.first_token_s is None or self.finished_s is None or self.num_output_tokens < 2:
            return None
        return (self.finished_s - self.first_token_s) / (self.num_output_tokens - 1)

    def meets(self, slo: Slo) -> bool:
        if not self.completed or self.ttft_s is None or self.ttft_s > slo.ttft_s:
            return False
        return self.tpot_s is None or self.tpot_s <= slo.tpot_s


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Mean and percentiles of one measure, over the requests that have it."""

    num_samples: int
    mean: float
    p50: float
    p90: float
    p99: float
    maximum: float


@dataclass(frozen=True, slots=True)
class SloReport:
    """Summary of a run. `attainment` is over all requests; `goodput_per_s` counts those that met the objectives."""

    num_requests: int
    num_completed: int
    num_rejected: int
    num_failed: int
    num_output_tokens: int
    duration_s: float
    ttft_s: Percentiles | None
    tpot_s: Percentiles | None
    attainment: float
    goodput_per_s: float


def slo_report(served: Sequence[Served], slo: Slo, duration_s: float) -> SloReport:
    """Summarises a run.

    Raises:
        InvalidRequestError: there are no requests, or the duration is not above zero.
    """
    if not served or not duration_s > 0:
        raise InvalidRequestError(f"{len(served)} requests in {duration_s} s make no report; both must be above zero")
    num_completed = sum(request.completed for request in served)
    num_rejected = sum(request.rejected for request in served)
    num_good = sum(request.meets(slo) for request in served)
    return SloReport(
        num_requests=len(served),
        num_completed=num_completed,
        num_rejected=num_rejected,
        num_failed=len(served) - num_completed - num_rejected,
        num_output_tokens=sum(request.num_output_tokens for request in served),
        duration_s=duration_s,
        ttft_s=percentiles([request.ttft_s for request in served if request.ttft_s is not None]),
        tpot_s=percentiles([request.tpot_s for request in served if request.tpot_s is not None]),
        attainment=num_good / len(served),
        goodput_per_s=num_good / duration_s,
    )


def percentiles(samples: Sequence[float]) -> Percentiles | None:
    """Nearest-rank percentiles: each is a sample that occurred. None when there is no sample."""
    return ordered_percentiles(sorted(samples))


def ordered_percentiles(ordered: Sequence[float]) -> Percentiles | None:
    """Percentiles of samples in rising order."""
    if not ordered:
        return None

    def at(share: float) -> float:
        return ordered[max(0, math.ceil(share * len(ordered)) - 1)]

    return Percentiles(len(ordered), math.fsum(ordered) / len(ordered), at(0.5), at(0.9), at(0.99), ordered[-1])
