"""Outlier ejection: sets a worker aside that is several times as slow as its peers, and probes it until it is not.

Peers are workers of one pool, kind and role: other hardware has its own calibrated speed and is priced instead. A
worker in service is set aside after some slow rounds in a row. Its time over, it may have one request at a time, and
what those show returns it to service or sets it aside for twice as long. Invariant: at most half of the peers are set
aside, so a peer that serves alone never is. Owned by one thread; decides from what workers measured, on a clock of the
caller's, so routers that hear the same measurements come to the same end.
"""

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from tandem.core.errors import ConfigurationError, InvalidRequestError, shown
from tandem.routing.least_squares import Vector
from tandem.routing.pace import PaceRounds
from tandem.routing.snapshot import WorkerState
from tandem.routing.speed import Speed

IN_SERVICE = float("-inf")

_Peers = tuple[str, str, str]  # fingerprint, kind, role


class MeasuredStage(StrEnum):
    """What a measurement is of; the two have speeds of their own."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class OutlierSettings:
    """Times in seconds.

    factor: a round is slow from so many times the median of the peers; infinite sets nobody aside.
    round_s, num_samples: a round lasts at least so long and has at least so many measurements.
    num_rounds: so many slow rounds in a row set aside, and so many others while probed return to service.
    num_probes: so many slow rounds in a row set aside again; the first steps after a long rest are slow by themselves.
    fresh_s: a peer's last round counts for so long.
    first_s, longest_s: the first time aside, and the bound of its doubling.
    calm: back in service for so many times its last time aside, a worker starts from `first_s` again.
    """

    factor: float = 4.0
    round_s: float = 1.0
    num_samples: int = 4
    num_rounds: int = 3
    num_probes: int = 2
    fresh_s: float = 60.0
    first_s: float = 5.0
    longest_s: float = 300.0
    calm: float = 4.0

    def __post_init__(self) -> None:
        if not self.factor > 1:
            raise ConfigurationError(f"factor={self.factor} would set usual workers aside; use more than 1")
        if not 0 < self.first_s <= self.longest_s:
            raise ConfigurationError(
                f"first_s={self.first_s}, longest_s={self.longest_s}; use 0 < first_s <= longest_s"
            )


@dataclass(frozen=True, slots=True)
class OutlierVerdict:
    """until_s: nothing is sent before, then one request at a time; `IN_SERVICE`: as to any other. slowness: times the
    peers' median when it was last set aside.
    """

    until_s: float = IN_SERVICE
    slowness: float = 1.0

    @property
    def is_aside(self) -> bool:
        return self.until_s != IN_SERVICE


@dataclass(slots=True)
class _Worker:
    """aside_s: how long it was set aside last. slow_stage: for which of the two. num_well: rounds of that stage in this
    probing that were not slow.
    """

    peers: _Peers
    is_present: bool = True
    paces: dict[MeasuredStage, PaceRounds] = field(
        default_factory=lambda: {stage: PaceRounds() for stage in MeasuredStage}
    )
    verdict: OutlierVerdict = OutlierVerdict()
    aside_s: float = 0.0
    returned_at_s: float = float("-inf")
    slow_stage: MeasuredStage | None = None
    num_well: int = 0


@dataclass(slots=True)
class _Median:
    value: float
    at_s: float


class Outliers:
    """`observe` measurements, then `judge` at every report. `forget` a worker that is gone for good.

    Args:
        speed_of: a kind's calibrated speed.
    """

    def __init__(self, speed_of: Callable[[str], Speed], settings: OutlierSettings | None = None) -> None:
        self._speed_of = speed_of
        self._settings = settings or OutlierSettings()
        self._workers: dict[str, _Worker] = {}
        self._present: dict[_Peers, set[str]] = {}
        self._medians: dict[tuple[_Peers, MeasuredStage], _Median] = {}

    def observe(
        self, state: WorkerState, stage: MeasuredStage, features: Vector, measured_ms: float, now_s: float
    ) -> None:
        """Count a measurement, with `features` as for the stage's `Fit`; one of a worker that is set aside does not
        count before it may be probed.

        Raises:
            InvalidRequestError: the time is no finite number above zero.
        """
        if not (math.isfinite(measured_ms) and measured_ms > 0):
            raise InvalidRequestError(
                f"measured_ms={shown(measured_ms)} is no measurement; a finite time above zero is"
            )
        worker = self._known(state)
        if worker.verdict.until_s <= now_s:
            worker.paces[stage].observe(features, measured_ms, now_s)

    def judge(self, state: WorkerState, now_s: float) -> OutlierVerdict:
        """The verdict on a worker that has just reported."""
        worker = self._known(state)
        for stage, pace in worker.paces.items():
            if pace.close_round(now_s, self._settings.round_s, self._settings.num_samples):
                ratio = pace.last.ratio(_coefficients(self._speed_of(state.kind), stage))
                self._weigh(worker, stage, ratio / self._median(worker.peers, stage, now_s), now_s)
        return worker.verdict

    def verdict(self, worker_id: str) -> OutlierVerdict:
        """The last one; in service where nothing is known."""
        worker = self._workers.get(worker_id)
        return OutlierVerdict() if worker is None else worker.verdict

    def leave(self, worker_id: str) -> None:
        """A worker is away: it is nobody's peer until it reports again; what was found of it is kept."""
        worker = self._workers.get(worker_id)
        if worker is not None and worker.is_present:
            worker.is_present = False
            present = self._present[worker.peers]
            present.discard(worker_id)
            if not present:
                del self._present[worker.peers]
                for stage in MeasuredStage:
                    self._medians.pop((worker.peers, stage), None)

    def forget(self, worker_id: str) -> None:
        """A worker is gone for good, or another has its id."""
        self.leave(worker_id)
        self._workers.pop(worker_id, None)

    def _known(self, state: WorkerState) -> _Worker:
        peers = (state.fingerprint, state.kind, state.role.value)
        worker = self._workers.get(state.worker_id)
        if worker is not None and worker.peers != peers:
            self.forget(state.worker_id)
            worker = None
        if worker is None:
            worker = self._workers[state.worker_id] = _Worker(peers)
        worker.is_present = True
        self._present.setdefault(peers, set()).add(state.worker_id)
        return worker

    def _weigh(self, worker: _Worker, stage: MeasuredStage, slowness: float, now_s: float) -> None:
        """What one closed round changes. NOTE: rounds of the other stage say nothing of the one that was slow."""
        is_slow, pace = slowness >= self._settings.factor, worker.paces[stage]
        pace.num_slow = pace.num_slow + 1 if is_slow else 0
        if worker.verdict.is_aside:
            if stage is worker.slow_stage:
                worker.num_well = 0 if is_slow else worker.num_well + 1
            if pace.num_slow >= self._settings.num_probes:
                self._set_aside(worker, stage, slowness, now_s)
            elif worker.num_well >= self._settings.num_rounds:
                worker.verdict, worker.returned_at_s = OutlierVerdict(), now_s
        elif pace.num_slow >= self._settings.num_rounds and self._may_lose_one(worker.peers):
            self._set_aside(worker, stage, slowness, now_s)

    def _set_aside(self, worker: _Worker, stage: MeasuredStage, slowness: float, now_s: float) -> None:
        settings = self._settings
        is_calm = not worker.verdict.is_aside and now_s - worker.returned_at_s > settings.calm * worker.aside_s
        worker.aside_s = settings.first_s if is_calm else min(2 * worker.aside_s, settings.longest_s)
        worker.verdict, worker.slow_stage, worker.num_well = OutlierVerdict(now_s + worker.aside_s, slowness), stage, 0
        for pace in worker.paces.values():
            pace.num_slow = 0
            pace.discard_round()

    def _may_lose_one(self, peers: _Peers) -> bool:
        """Whether at most half of them are set aside with one more."""
        num_aside = sum(worker.verdict.is_aside for worker in self._peers(peers))
        return num_aside + 1 <= len(self._present[peers]) // 2

    def _median(self, peers: _Peers, stage: MeasuredStage, now_s: float) -> float:
        """The lower median of the peers' last rounds, this worker's own included; looked up once in a round's time."""
        known = self._medians.get((peers, stage))
        if known is None or not 0 <= now_s - known.at_s < self._settings.round_s / 2:
            oldest_s = now_s - self._settings.fresh_s
            coefficients = _coefficients(self._speed_of(peers[1]), stage)
            paces = (worker.paces[stage] for worker in self._peers(peers))
            value = statistics.median_low(
                pace.last.ratio(coefficients) for pace in paces if pace.closed_at_s >= oldest_s
            )
            known = self._medians[peers, stage] = _Median(value, now_s)
        return known.value

    def _peers(self, peers: _Peers) -> Iterator[_Worker]:
        return (self._workers[worker_id] for worker_id in self._present[peers])


def _coefficients(speed: Speed, stage: MeasuredStage) -> Vector:
    if stage is MeasuredStage.PREFILL:
        return speed.prefill.ms_per_request, speed.prefill.ms_per_token, speed.prefill.ms_per_pair
    return speed.decode.ms_per_step, speed.decode.ms_per_request, speed.decode.ms_per_context_token
