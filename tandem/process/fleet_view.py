"""A router's view of its workers: the last status of each, and the state that routing derives from them.

`fleet_watch` feeds it. Invariant: `fleet` holds exactly the workers that are ready or draining and whose watch is
alive; of each worker id only the latest incarnation, and of each address only the worker that answers there now. Owned
by one thread; does no I/O.
"""

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from tandem.core.clock import Clock
from tandem.core.errors import CapacityError, InvalidRequestError, shown
from tandem.core.hashing import root_hash
from tandem.core.scope import CacheScope
from tandem.routing.calibration import Calibration
from tandem.routing.fleet import Fleet
from tandem.routing.outliers import MeasuredStage, Outliers, OutlierSettings, OutlierVerdict
from tandem.routing.snapshot import LinkState, Role
from tandem.rpc.messages import LinkReport, ModelInfo, WorkerAddress, WorkerListing, WorkerStatus

_LOG = logging.getLogger(__name__)

READY, DRAINING = "ready", "draining"


@dataclass(frozen=True, slots=True)
class Chain:
    """Inputs of a chain of block hashes other than tokens and scope. `block_size`: tokens of a block; `pools`: the KV
    fingerprints of the workers that use the chain.
    """

    model_fingerprint: str
    block_size: int
    pools: frozenset[str]

    def root(self, scope: CacheScope) -> bytes:
        """Hash from which the block hashes of a scope are chained."""
        return root_hash(scope, model_fingerprint=self.model_fingerprint, block_size=self.block_size)


@dataclass(slots=True)
class _Worker:
    """A worker known to the router.

    is_alive: its watch is open and not silent. is_replaced: another worker answers at its address now.
    links: the last update of its links: (number of the fleet's change it followed, measured links, cut sources).
    """

    status: WorkerStatus
    address: str
    seen_at_s: float
    is_alive: bool = True
    is_replaced: bool = False
    links: tuple[int, tuple[LinkReport, ...], tuple[str, ...]] = (0, (), ())


class FleetView:
    """Updates `fleet`, its links, `calibration` and `outliers` from worker statuses, and looks up models and
    workers.

    Args:
        outliers: ejects slow workers, whose samples then do not calibrate their kind. None: no ejection.
        dead_s: a worker without a status for this long is silent.
        forget_s: time for which a dead worker stays listed.
        max_workers: maximum number of workers; further ones are refused.
    """

    def __init__(
        self,
        fleet: Fleet,
        calibration: Calibration,
        clock: Clock,
        *,
        outliers: Outliers | None = None,
        dead_s: float = 2.0,
        forget_s: float = 60.0,
        max_workers: int = 16_384,
    ) -> None:
        self._fleet = fleet
        self._calibration = calibration
        self._outliers = outliers or Outliers(calibration.speed, OutlierSettings(factor=math.inf))
        self._clock = clock
        self._dead_s = dead_s
        self._forget_s = forget_s
        self._max_workers = max_workers
        self._workers: dict[str, _Worker] = {}
        self._at: dict[str, str] = {}
        self._num_changes = 1
        self._chains: Mapping[str, Sequence[Chain]] | None = None

    def update(self, address: str, status: WorkerStatus) -> None:
        """Store the status of the worker that answers at `address`.

        Raises:
            InvalidRequestError: the status contradicts itself.
            CapacityError: `max_workers` others are known.
        """
        worker_id = status.worker.worker_id
        if not worker_id or status.state.worker_id != worker_id:
            raise InvalidRequestError(f"{address} calls itself {shown(worker_id)} and {shown(status.state.worker_id)}")
        known = self._workers.get(worker_id)
        if known is not None and known.is_alive and known.address != address and known.status.epoch >= status.epoch:
            return  # NOTE: a second address of the same worker, or an old incarnation that has not ended yet
        if known is None and len(self._workers) >= self._max_workers:
            raise CapacityError(f"{self._max_workers} workers are known, which is all a router keeps")
        self._arrive(address, worker_id)
        if known is not None and known.status.worker.incarnation != status.worker.incarnation:
            self._leave(worker_id)
            self._forget_speed(worker_id)
        self._keep(address, status)

    def mark_lost(self, address: str) -> None:
        """Record that the watch at `address` is broken or silent: its worker gets no requests from now on."""
        worker_id = self._at.pop(address, None)
        if worker_id is not None:
            self._workers[worker_id].is_alive = False
            self._leave(worker_id)

    def is_alive_at(self, address: str) -> bool:
        """Whether the watch at `address` is alive."""
        return address in self._at

    def forgettable(self) -> Sequence[tuple[str, str]]:
        """Returns (id, address) of dead workers without a status for `forget_s`, and of replaced ones (address "")."""
        oldest_s = self._clock.now_s() - self._forget_s
        return [
            (worker_id, "" if worker.is_replaced else worker.address)
            for worker_id, worker in self._workers.items()
            if not worker.is_alive and (worker.is_replaced or worker.seen_at_s < oldest_s)
        ]

    def forget(self, worker_id: str) -> None:
        """Drop a dead worker from the list."""
        worker = self._workers.get(worker_id)
        if worker is not None and not worker.is_alive:
            del self._workers[worker_id]
            self._forget_speed(worker_id)

    def chains(self, model: str) -> Sequence[Chain]:
        """Returns the hash inputs of the workers serving this model; several while a new version is rolled out."""
        if self._chains is None:
            self._chains = _chains_of([worker.status for worker in self._workers.values() if self._is_served(worker)])
        return self._chains.get(model, ())

    def is_of(self, worker_id: str, chain: Chain) -> bool:
        """Whether a worker's blocks are hashed by this chain."""
        worker = self._workers.get(worker_id)
        return worker is not None and worker.status.state.fingerprint in chain.pools

    def address_of(self, worker_id: str) -> WorkerAddress:
        """Returns the address of a worker of `fleet`."""
        worker = self._workers[worker_id]
        return replace(worker.status.worker, address=worker.address)

    def model_fingerprint(self, worker_id: str) -> str:
        """Fingerprint of the model that a worker of `fleet` serves."""
        return self._workers[worker_id].status.model.fingerprint

    def known_models(self) -> Sequence[str]:
        """Names of the models of all known workers, including starting and dead ones."""
        return sorted({worker.status.model.name for worker in self._workers.values()})

    def models(self) -> Sequence[ModelInfo]:
        """Returns the models with at least one decode worker now. Where workers differ, the smallest limits count."""
        by_name: dict[str, list[WorkerStatus]] = {}
        for worker in self._workers.values():
            if self._is_given_requests(worker):
                by_name.setdefault(worker.status.model.name, []).append(worker.status)
        found = [_model_of(by_name[name]) for name in sorted(by_name)]
        return [model for model in found if model.num_decode]

    def listings(self) -> Sequence[WorkerListing]:
        """Returns every known worker, including dead ones that have not been forgotten yet."""
        now_s = self._clock.now_s()
        return [
            WorkerListing(
                status=worker.status,
                age_s=now_s - worker.seen_at_s,
                is_alive=self._is_given_requests(worker),
                slowness=_slowness(self._outliers.verdict(worker_id)),
            )
            for worker_id, worker in self._workers.items()
        ]

    def _arrive(self, address: str, worker_id: str) -> None:
        """Record that `worker_id` answers at `address`, and at no other address."""
        former_id = self._at.get(address)
        if former_id is not None and former_id != worker_id:
            self.mark_lost(address)
        for other_id, other in self._workers.items() if former_id != worker_id else ():
            other.is_replaced |= other.address == address and other_id != worker_id
        known = self._workers.get(worker_id)
        if known is not None and known.address != address and self._at.get(known.address) == worker_id:
            del self._at[known.address]
        self._at[address] = worker_id

    def _keep(self, address: str, status: WorkerStatus) -> None:
        worker_id, now_s = status.worker.worker_id, self._clock.now_s()
        known = self._workers.get(worker_id)
        if known is None or not known.is_alive or _identity(known.status) != _identity(status):
            self._num_changes += 1
            self._chains = None
        links = known.links if known is not None else (0, (), ())
        worker = self._workers[worker_id] = _Worker(status, address, now_s, links=links)
        verdict = self._learn(status)
        if not self._is_served(worker):
            self._fleet.remove(worker_id)
            return
        state = replace(status.state, draining=status.lifecycle == DRAINING, reported_at_s=now_s)
        self._fleet.report(state, verdict.until_s)
        if worker.links != (self._num_changes, status.links, status.unreachable):
            worker.links = (self._num_changes, status.links, status.unreachable)
            self._learn_links(status)

    def _leave(self, worker_id: str) -> None:
        self._fleet.remove(worker_id)
        self._outliers.leave(worker_id)
        self._num_changes += 1
        self._chains = None

    def _forget_speed(self, worker_id: str) -> None:
        self._calibration.forget(worker_id)
        self._outliers.forget(worker_id)

    def _learn(self, status: WorkerStatus) -> OutlierVerdict:
        """Pass the status's samples to outlier ejection and calibration; ignores invalid measurements."""
        worker_id, before = status.worker.worker_id, self._outliers.verdict(status.worker.worker_id)
        try:
            self._compare(status)
            if not before.is_aside:
                self._calibrate(status)
        except InvalidRequestError as error:
            _LOG.debug("a sample of worker %s is left out: %s", worker_id, error)
        verdict = self._outliers.judge(status.state, self._clock.now_s())
        if verdict != before:
            _log_verdict(worker_id, verdict, self._clock.now_s())
        return verdict

    def _compare(self, status: WorkerStatus) -> None:
        observe, now_s = partial(self._outliers.observe, status.state), self._clock.now_s()
        for sample in status.prefill_samples:
            work = sample.work
            features = (work.num_requests, work.num_tokens, work.num_pairs)
            observe(MeasuredStage.PREFILL, features, 1000 * sample.duration_s, now_s)
        for step in status.step_samples:
            features = (1.0, step.num_running, step.num_context_tokens)
            observe(MeasuredStage.DECODE, features, 1000 * step.duration_s, now_s)

    def _calibrate(self, status: WorkerStatus) -> None:
        worker_id, kind = status.worker.worker_id, status.state.kind
        for sample in status.prefill_samples:
            self._calibration.observe_prefill(worker_id, kind, sample.work, 1000 * sample.duration_s)
        for step in status.step_samples:
            self._calibration.observe_step(
                worker_id, kind, step.num_running, step.num_context_tokens, 1000 * step.duration_s
            )

    def _learn_links(self, status: WorkerStatus) -> None:
        """Store links from workers of the fleet only; those of others would never be removed."""
        links, worker_id = self._fleet.links, status.worker.worker_id
        links.cut([name for name in status.unreachable if self._fleet.snapshot(name) is not None], worker_id)
        for link in status.links:
            is_there = self._fleet.snapshot(link.source_id) is not None
            is_cut = link.source_id in status.unreachable
            if is_there and not is_cut and link.bytes_per_s > 0 <= link.latency_s:
                links.update(link.source_id, worker_id, LinkState(link.bytes_per_s, 1000 * link.latency_s))

    def _is_served(self, worker: _Worker) -> bool:
        return worker.is_alive and worker.status.lifecycle in (READY, DRAINING)

    def _is_given_requests(self, worker: _Worker) -> bool:
        is_fresh = self._clock.now_s() - worker.seen_at_s <= self._dead_s
        return worker.is_alive and is_fresh and worker.status.lifecycle == READY


def _identity(status: WorkerStatus) -> tuple[object, ...]:
    """The fields on which `chains` and the fleet's membership depend."""
    model = status.model
    return (status.worker, status.lifecycle, status.state.fingerprint, model.name, model.fingerprint, model.block_size)


def _slowness(verdict: OutlierVerdict) -> float | None:
    return verdict.slowness if verdict.is_aside else None


def _log_verdict(worker_id: str, verdict: OutlierVerdict, now_s: float) -> None:
    if verdict.is_aside:
        _LOG.warning(
            "worker %s is set aside for %.0f s: it takes %.1f times as long as its peers",
            *(worker_id, verdict.until_s - now_s, verdict.slowness),
        )
    else:
        _LOG.info("worker %s serves again: it keeps up with its peers", worker_id)


def _chains_of(statuses: Iterable[WorkerStatus]) -> dict[str, Sequence[Chain]]:
    pools: dict[str, dict[tuple[str, int], set[str]]] = {}
    for status in statuses:
        key = (status.model.fingerprint, status.state.block_size)
        pools.setdefault(status.model.name, {}).setdefault(key, set()).add(status.state.fingerprint)
    return {
        name: [Chain(fingerprint, block_size, frozenset(found)) for (fingerprint, block_size), found in chains.items()]
        for name, chains in pools.items()
    }


def _model_of(statuses: Sequence[WorkerStatus]) -> ModelInfo:
    models = [status.model for status in statuses]
    return replace(
        models[0],
        max_model_len=min(model.max_model_len for model in models),
        vocab_size=min(model.vocab_size for model in models),
        num_prefill=sum(status.state.role is not Role.DECODE for status in statuses),
        num_decode=sum(status.state.role is not Role.PREFILL for status in statuses),
    )
