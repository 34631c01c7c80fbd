"""All workers known to the router: their last reports plus the requests sent to them since.

Invariant: a snapshot is the report plus the delta of every sent request that the report cannot include yet. A delta
is dropped when its request ends, or when a report's figures were asked for at least `settle_s` after it was sent, so a
lost request does not load a worker for ever.
Owned by one thread. Decides nothing.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tandem.routing.admission import AdmissionLimits, num_lacking_blocks
from tandem.routing.candidates import Candidates, Placement, WorkerSnapshot, num_blocks_of, num_cached_tokens
from tandem.routing.eligible_workers import EligibleWorkers
from tandem.routing.outliers import IN_SERVICE
from tandem.routing.pricing import wait_ms
from tandem.routing.snapshot import Links, RequestShape, Role, WorkerState
from tandem.routing.speed import NO_WORK, PrefillWork, Speed
from tandem.routing.worker_table import WorkerTable

_FIRST_TURNS = 1 << 52  # NOTE: first turns are random and below all later ones, so replicas do not move in step


@dataclass(frozen=True, slots=True)
class _Delta:
    """Load that one request, sent recently, adds to one worker."""

    sent_at_s: float
    work: PrefillWork = NO_WORK
    num_running: int = 0
    num_context_tokens: int = 0
    num_blocks: int = 0
    num_awaiting_kv: int = 0


class WorkerPool:
    """Workers of one KV-compatibility fingerprint; only workers of the same pool can exchange KV blocks."""

    def __init__(self, links: Links) -> None:
        self.prefill = WorkerTable(links)
        self.decode = WorkerTable(links)
        self.everyone: dict[str, WorkerSnapshot] = {}

    def put(self, snapshot: WorkerSnapshot) -> None:
        worker = snapshot.worker
        self.everyone[worker.worker_id] = snapshot
        _keep(self.prefill, snapshot, worker.role is not Role.DECODE and not worker.draining)
        _keep(self.decode, snapshot, worker.role is not Role.PREFILL and not worker.draining)

    def drop(self, worker_id: str) -> None:
        self.prefill.drop(worker_id)
        self.decode.drop(worker_id)
        self.everyone.pop(worker_id, None)

    def refresh_link(self, worker_id: str) -> None:
        self.prefill.refresh_link(worker_id)
        self.decode.refresh_link(worker_id)


class Fleet:
    """Keeps worker snapshots by pool and selects the candidates of each decision.

    speed_of: the calibrated speed of a kind of worker. seed: determines how the first ties are broken.
    """

    def __init__(
        self, limits: AdmissionLimits, links: Links, speed_of: Callable[[str], Speed], seed: int | str = 0
    ) -> None:
        self.limits = limits
        self.links = links
        self._speed_of = speed_of
        self._random = random.Random(seed)
        self._pools: dict[str, WorkerPool] = {}
        self._pool_of: dict[str, str] = {}
        self._deltas: dict[str, dict[str, _Delta]] = {}
        self._next_turn = 0
        self._swept_at_s = float("-inf")

    def report(self, state: WorkerState, aside_until_s: float = IN_SERVICE) -> None:
        """Store a worker's report and the end of its ejection as an outlier; ignores a report older than the last."""
        known = self.snapshot(state.worker_id)
        if known is not None and state.reported_at_s < known.worker.reported_at_s:
            return
        if self._pool_of.get(state.worker_id, state.fingerprint) != state.fingerprint:
            self.remove(state.worker_id)
        settled_s = state.reported_at_s - state.figures_age_s - self.limits.settle_s
        deltas = self._deltas.setdefault(state.worker_id, {})
        for key in [key for key, delta in deltas.items() if delta.sent_at_s <= settled_s]:
            del deltas[key]
        turn = known.turn if known is not None else self._random.randrange(_FIRST_TURNS) - _FIRST_TURNS
        self._pool_of[state.worker_id] = state.fingerprint
        self._put(state, turn, aside_until_s)

    def remove(self, worker_id: str) -> None:
        """Forget a worker, and its links with it."""
        fingerprint = self._pool_of.pop(worker_id, None)
        if fingerprint is None:
            return
        self._deltas.pop(worker_id, None)
        self.links.forget(worker_id)
        pool = self._pools[fingerprint]
        pool.drop(worker_id)
        if not pool.everyone:
            del self._pools[fingerprint]

    def snapshot(self, worker_id: str) -> WorkerSnapshot | None:
        fingerprint = self._pool_of.get(worker_id)
        return None if fingerprint is None else self._pools[fingerprint].everyone[worker_id]

    def num_workers(self) -> int:
        return len(self._pool_of)

    def pools(self, request: RequestShape) -> Iterable[WorkerPool]:
        """Returns the pools that may serve the request."""
        wanted = request.fingerprints
        return [pool for fingerprint, pool in self._pools.items() if wanted is None or fingerprint in wanted]

    def candidates(self, request: RequestShape, pool: WorkerPool, now_s: float) -> Candidates:
        """Returns the workers that may be chosen; free space of decode workers is not considered yet."""
        self._sweep(now_s)
        self._refresh_links()
        max_ttft_ms = request.max_ttft_ms if request.max_ttft_ms is not None else self.limits.max_ttft_ms
        prefills = WorkerTable(self.links) if request.local_prefill else pool.prefill
        return Candidates(
            prefill=self._eligible(prefills, request, request.num_tokens, now_s),
            decode=self._able(request, pool, now_s).without_ids(request.reserved),
            holders=pool.everyone,
            links=self.links,
            now_s=now_s,
            oldest_s=now_s - self.limits.dead_s,
            max_ttft_ms=max_ttft_ms,
            max_local_tokens=self.limits.max_local_tokens,
        )

    def spares(
        self, request: RequestShape, prefill_id: str, decode_id: str, now_s: float, num_spares: int
    ) -> Sequence[str]:
        """Returns other prefill workers of the same pool, to use if `prefill_id` fails; shortest wait first. Never the
        decode worker, which computes the prompt itself if all fail.
        """
        pool = self._pools[self._pool_of[prefill_id]]
        others = self._eligible(pool.prefill, request, request.num_tokens, now_s).without_ids(
            (prefill_id, decode_id, *self.links.cut_into(decode_id))
        )
        waits_ms = others.forbid(wait_ms(others.columns, now_s))
        spares: list[str] = []
        for _ in range(min(num_spares, len(others))):
            row = others.first(waits_ms)
            waits_ms[row] = np.inf
            spares.append(others.table.snapshots[row].worker_id)
        return spares

    def able_ids(self, request: RequestShape, now_s: float) -> frozenset[str]:
        """Ids of the decode workers that could serve this request if they were empty."""
        able = (self._able(request, pool, now_s) for pool in self.pools(request))
        return frozenset(snapshot.worker_id for workers in able for snapshot in workers)

    def is_served(self, request: RequestShape, now_s: float) -> bool:
        """Whether any live worker could decode this request if it were short."""
        return any(self._eligible(self._decodes(request, pool), request, 1, now_s) for pool in self.pools(request))

    def _able(self, request: RequestShape, pool: WorkerPool, now_s: float) -> EligibleWorkers:
        """Returns the decode workers that are eligible for the whole request."""
        num_tokens = request.num_tokens + request.num_expected_output
        return self._eligible(self._decodes(request, pool), request, num_tokens, now_s)

    def _eligible(self, table: WorkerTable, request: RequestShape, num_tokens: int, now_s: float) -> EligibleWorkers:
        """Returns workers that are alive, not excluded, large enough when empty, and not ejected (unless all are)."""
        eligible, columns = EligibleWorkers(table), table.columns
        oldest_s = now_s - self.limits.dead_s
        if columns.reported_at_s.min(initial=np.inf) < oldest_s:
            eligible = eligible.without(columns.reported_at_s < oldest_s)
        num_blocks = num_blocks_of(num_tokens, eligible.block_size)
        if columns.num_total_blocks.min(initial=np.inf) < num_blocks:
            eligible = eligible.without(columns.num_total_blocks < num_blocks)
        return _without_aside(eligible.without_ids(request.excluded), now_s)

    def _decodes(self, request: RequestShape, pool: WorkerPool) -> WorkerTable:
        if request.decode_id is None:
            return pool.decode
        pinned = pool.everyone.get(request.decode_id)
        return WorkerTable.of([] if pinned is None else [pinned], self.links)

    def _refresh_links(self) -> None:
        """Tell the tables which links have improved."""
        for worker_id in self.links.take_improved():
            fingerprint = self._pool_of.get(worker_id)
            if fingerprint is not None:
                self._pools[fingerprint].refresh_link(worker_id)

    def _sweep(self, now_s: float) -> None:
        """Remove workers that have not reported for `forget_s`, to bound memory."""
        if now_s - self._swept_at_s < self.limits.forget_s:
            return
        self._swept_at_s = now_s
        oldest_s = now_s - self.limits.forget_s
        for pool in list(self._pools.values()):
            for snapshot in [s for s in pool.everyone.values() if s.reported_at_s < oldest_s]:
                self.remove(snapshot.worker_id)

    def sent(self, request: RequestShape, choice: Placement, now_s: float) -> None:
        """Add a request's load to its workers until their reports include it."""
        first = choice.prefill or choice.decode
        source = choice.holder or first
        work = PrefillWork.of(request.num_tokens, num_cached_tokens(request, source.worker))
        serving = _Delta(
            now_s,
            num_running=1,
            num_context_tokens=request.num_tokens,
            num_blocks=num_lacking_blocks(request, choice.decode),
        )
        if choice.prefill is None:
            self._add(choice.decode, request.key, replace(serving, work=work))
            return
        self._add(choice.prefill, request.key, replace(serving, work=work, num_blocks=0))
        if request.decode_id is None:
            self._add(choice.decode, request.key, replace(serving, num_awaiting_kv=1))

    def ended(self, key: str, worker_ids: Iterable[str]) -> None:
        """Remove the load of a request that ended or moved, on workers whose reports do not include it yet.

        `key`: as `RequestShape.key`.
        """
        for worker_id in worker_ids:
            if self._deltas.get(worker_id, {}).pop(key, None) is not None:
                snapshot = self.snapshot(worker_id)
                assert snapshot is not None
                self._put(snapshot.worker, snapshot.turn, snapshot.aside_until_s)

    def _add(self, snapshot: WorkerSnapshot, key: str, delta: _Delta) -> None:
        worker = snapshot.worker
        self._deltas[worker.worker_id][key] = delta
        self._next_turn += 1
        self._pools[worker.fingerprint].put(_with_delta(snapshot, delta, self._next_turn))

    def _put(self, state: WorkerState, turn: int, aside_until_s: float) -> None:
        speed, deltas = self._speed_of(state.kind), self._deltas[state.worker_id].values()
        snapshot = snapshot_of(state, speed, deltas, self.limits.fresh_s, turn, aside_until_s)
        pool = self._pools.get(state.fingerprint)
        if pool is None:
            pool = self._pools[state.fingerprint] = WorkerPool(self.links)
        pool.put(snapshot)


def snapshot_of(
    state: WorkerState,
    speed: Speed,
    deltas: Iterable[_Delta] = (),
    fresh_s: float = 0.75,
    turn: int = 0,
    aside_until_s: float = IN_SERVICE,
) -> WorkerSnapshot:
    """Snapshot of a worker: its report with the requests sent since added, in the order they were sent."""
    snapshot = WorkerSnapshot(
        worker=state,
        speed=speed,
        worker_id=state.worker_id,
        reported_at_s=state.reported_at_s,
        num_total_blocks=state.num_total_blocks,
        joined_step_ms=speed.decode.step_ms(state.num_running + 1, state.num_context_tokens),
        free_at_s=state.reported_at_s - state.taken_age_s + speed.prefill.ms(state.queued) / 1000,
        stale_from_s=state.reported_at_s + fresh_s,
        queued=state.queued,
        num_running=state.num_running,
        num_context_tokens=state.num_context_tokens,
        num_free_blocks=state.num_free_blocks,
        num_awaiting_kv=state.num_awaiting_kv,
        turn=turn,
        aside_until_s=aside_until_s,
    )
    for delta in deltas:
        snapshot = _with_delta(snapshot, delta, turn)
    return snapshot


def _with_delta(snapshot: WorkerSnapshot, delta: _Delta, turn: int) -> WorkerSnapshot:
    """Returns `snapshot` with the load of one more request."""
    speed = snapshot.speed
    num_running = snapshot.num_running + delta.num_running
    num_context_tokens = snapshot.num_context_tokens + delta.num_context_tokens
    work_ms = speed.prefill.ms(delta.work)
    return WorkerSnapshot(  # NOTE: `dataclasses.replace` would take five times as long, twice in each decision
        worker=snapshot.worker,
        speed=speed,
        worker_id=snapshot.worker_id,
        reported_at_s=snapshot.reported_at_s,
        num_total_blocks=snapshot.num_total_blocks,
        joined_step_ms=speed.decode.step_ms(num_running + 1, num_context_tokens),
        free_at_s=max(snapshot.free_at_s, delta.sent_at_s) + work_ms / 1000 if work_ms else snapshot.free_at_s,
        stale_from_s=snapshot.stale_from_s,
        queued=snapshot.queued + delta.work,
        num_running=num_running,
        num_context_tokens=num_context_tokens,
        num_free_blocks=max(0, snapshot.num_free_blocks - delta.num_blocks),
        num_awaiting_kv=snapshot.num_awaiting_kv + delta.num_awaiting_kv,
        turn=turn,
        aside_until_s=snapshot.aside_until_s,
    )


def _without_aside(eligible: EligibleWorkers, now_s: float) -> EligibleWorkers:
    """Returns workers that are in service, and ejected ones that are due for a probe and idle; all if none is left."""
    columns = eligible.columns
    if columns.aside_until_s.max(initial=IN_SERVICE) == IN_SERVICE:
        return eligible
    is_busy = (columns.aside_until_s > IN_SERVICE) & (columns.num_running > 0)
    others = eligible.without((columns.aside_until_s > now_s) | is_busy)
    return others if others else eligible


def _keep(part: WorkerTable, snapshot: WorkerSnapshot, wanted: bool) -> None:
    if wanted:
        part.put(snapshot)
    else:
        part.drop(snapshot.worker_id)
