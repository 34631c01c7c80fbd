"""Outlier ejection: sets aside a worker that is several times slower than its peers, and probes it until it recovers.

Peers are workers of the same pool, kind and role: other hardware has its own calibrated speed, which the cost takes
into account. A worker in service is set aside after several slow rounds in a row. After its time aside it gets one
request at a time, and their measured times return it to service or set it aside for twice as long. Invariant: at most
half of the peers are set aside, so a worker without peers never is. Owned by one thread; the time is an argument, so
routers that receive the same measurements decide the same.
"""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from tandem.core.errors import ConfigurationError
from tandem.routing.least_squares import Vector
from tandem.routing.measurement import require_measurement
from tandem.routing.pace import PaceRounds
from tandem.routing.snapshot import WorkerState
from tandem.routing.speed import Speed

IN_SERVICE = float("-inf")  # `until_s` of a worker that is not set aside

_Peers = tuple[str, str, str]  # fingerprint, kind, role


class MeasuredStage(StrEnum):
    """Stage that a measurement belongs to; each stage has its own speed model."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class OutlierSettings:
    """Settings of outlier ejection. Times in seconds.

    Args:
        factor: a round is slow if it takes at least this multiple of the peers' median; infinity disables ejection.
        round_s, num_samples: minimum duration of a round and minimum number of its measurements.
        num_rounds: slow rounds in a row that set a worker aside; also the normal rounds in a row that end its probing.
        num_probes: slow rounds in a row that set a probed worker aside again; the first steps after a long idle time
            are slow anyway.
        fresh_s: time for which a peer's last round counts in the median.
        first_s, longest_s: the first time aside, and the upper bound of its doubling.
        calm: a worker in service for this multiple of its last time aside starts from `first_s` again.
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
    """Verdict on one worker.

    Args:
        until_s: no requests are sent before this time, then one at a time; `IN_SERVICE`: no restriction.
        slowness: multiple of the peers' median when it was last set aside.
    """

    until_s: float = IN_SERVICE
    slowness: float = 1.0

    @property
    def is_aside(self) -> bool:
        return self.until_s != IN_SERVICE


@dataclass(slots=True)
class _Worker:
    """State of one worker.

    aside_s: duration of its last time aside. slow_stage: stage for which it was set aside. num_well: rounds of that
    stage in a row that were not slow while probed.
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
    """Detects slow workers: call `observe` for measurements, `judge` at every report, `forget` for removed workers.

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
        """Add a measurement; `features`: the three values that the stage's speed coefficients multiply. Ignored while
        the worker may not be probed yet.

        Raises:
            InvalidRequestError: `measured_ms` or a feature is out of range.
        """
        require_measurement(features, measured_ms)
        worker = self._known(state)
        if worker.verdict.until_s <= now_s:
            worker.paces[stage].observe(features, measured_ms, now_s)

    def judge(self, state: WorkerState, now_s: float) -> OutlierVerdict:
        """Returns the verdict on a worker that has just reported, with its completed rounds taken into account."""
        worker = self._known(state)
        for stage, pace in worker.paces.items():
            if pace.close_round(now_s, self._settings.round_s, self._settings.num_samples):
                ratio = pace.last.ratio(_coefficients(self._speed_of(state.kind), stage))
                self._weigh(worker, stage, ratio / self._median(worker.peers, stage, now_s), now_s)
        return worker.verdict

    def verdict(self, worker_id: str) -> OutlierVerdict:
        """Returns a worker's last verdict; in service for an unknown worker."""
        worker = self._workers.get(worker_id)
        return OutlierVerdict() if worker is None else worker.verdict

    def leave(self, worker_id: str) -> None:
        """Remove a worker from its peers until it reports again; its state is kept."""
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
        """Remove a worker and its state: it is gone for good, or another worker has its id."""
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
        """Update the verdict after one closed round. NOTE: while a worker is probed, only normal rounds of the stage
        that was slow count towards its return.
        """
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
        """Whether at most half of the peers are set aside after one more."""
        num_aside = sum(worker.verdict.is_aside for worker in self._peers(peers))
        return num_aside + 1 <= len(self._present[peers]) // 2

    def _median(self, peers: _Peers, stage: MeasuredStage, now_s: float) -> float:
        """Lower median of the peers' last rounds, this worker's included; cached for half of `round_s`."""
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
