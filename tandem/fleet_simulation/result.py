"""Result of a simulated run: every request's outcome, the pools over time, and their cost."""

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.workload.slo import Served, Slo, SloReport, slo_report


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSizes:
    """Sizes of both pools at one moment. `alive` counts starting and draining replicas too."""

    at_s: float
    prefill_wanted: int
    prefill_ready: int
    prefill_alive: int
    decode_wanted: int
    decode_ready: int
    decode_alive: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """Outcome of a run. `duration_s`: from the start to the last event. `*_accelerator_s`: accelerator-seconds of each
    pool.

    Args:
        num_changes: how often the wanted size of a pool changed.
        reasons: (time, explanation by the policy) of each change.
    """

    served: Sequence[Served]
    sizes: Sequence[PoolSizes]
    duration_s: float
    prefill_accelerator_s: float
    decode_accelerator_s: float
    num_changes: int
    reasons: Sequence[tuple[float, str]]

    @property
    def accelerator_hours(self) -> float:
        return (self.prefill_accelerator_s + self.decode_accelerator_s) / 3600

    def report(self, slo: Slo) -> SloReport:
        return slo_report(self.served, slo, self.duration_s)
