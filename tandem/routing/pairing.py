"""Picks the prefill and decode workers of each request, and keeps predicted beside measured times.

Invariant: no request is refused while an admissible choice exists, whatever the policy: if the policy finds none, the
search of all choices decides. Owned by one thread; never blocks, never does I/O.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tandem.core.errors import ConfigurationError
from tandem.routing.admission import Refusal, refuse_dead, refuse_early, refuse_full, refuse_late, refuse_long
from tandem.routing.candidates import Candidates, Placement, num_blocks_of, num_cached_tokens
from tandem.routing.cost import Prediction, predict
from tandem.routing.eligible_workers import EligibleWorkers
from tandem.routing.fleet import Fleet
from tandem.routing.policies import RoutingPolicy
from tandem.routing.search import cheapest
from tandem.routing.settlement import Settlement
from tandem.routing.snapshot import Links, RequestShape

DEFAULT_MAX_RECORDS = 4096  # latest decisions that are kept


@dataclass(frozen=True, slots=True)
class Pairing:
    """Ids of the workers that serve a request. `prefill_id` None: the decode worker computes the prompt itself.
    `fetch_from_id`: worker from which the one that computes the prompt fetches a cached prefix; None = it fetches none.
    """

    prefill_id: str | None
    decode_id: str
    fetch_from_id: str | None
    predicted: Prediction


@dataclass(frozen=True, slots=True)
class DecisionRecord:
    """Record of one decision, shown to operators and used to measure the error of predictions."""

    request_id: str
    decided_at_s: float
    policy: str
    answer: Pairing | Refusal
    outcome: Settlement | None = None

    @property
    def ttft_error_ms(self) -> float | None:
        """Measured minus predicted time to the first token."""
        if self.outcome is None or self.outcome.ttft_ms is None or isinstance(self.answer, Refusal):
            return None
        return self.outcome.ttft_ms - self.answer.predicted.ttft_ms


class Pairer:
    """Decides pairings. Pass worker reports to `fleet`, requests to `pair` and measured times to `settle`."""

    def __init__(self, fleet: Fleet, policy: RoutingPolicy, max_records: int = DEFAULT_MAX_RECORDS) -> None:
        if max_records < 1:
            raise ConfigurationError(f"max_records={max_records} keeps no decision; use 1 or more")
        self.fleet = fleet
        self._policy = policy
        self._max_records = max_records
        self._records: OrderedDict[str, DecisionRecord] = OrderedDict()

    @property
    def policy_name(self) -> str:
        return self._policy.name

    def pair(self, request: RequestShape, now_s: float) -> Pairing | Refusal:
        """Choose workers, add the request's load to their snapshots, and record the decision."""
        self._stop_counting(request.key)
        answer = self._decide(request, now_s)
        record = DecisionRecord(request.request_id, now_s, self._policy.name, answer)
        self._records[request.key] = record
        self._records.move_to_end(request.key)
        if len(self._records) > self._max_records:
            self._records.popitem(last=False)
        return answer

    def settle(self, outcome: Settlement) -> DecisionRecord | None:
        """Record a request's measured times and remove its load from the snapshots; None if it has no record."""
        self._stop_counting(outcome.key)
        record = self._records.get(outcome.key)
        if record is not None:
            record = self._records[outcome.key] = replace(record, outcome=outcome)
        return record

    def records(self) -> Sequence[DecisionRecord]:
        """Returns the latest decisions, oldest first."""
        return tuple(self._records.values())

    def _stop_counting(self, key: str) -> None:
        """Remove the request's load from the workers it was sent to before; a second pairing replaces the first."""
        record = self._records.get(key)
        if record is not None and isinstance(record.answer, Pairing):
            ids = (record.answer.prefill_id, record.answer.decode_id)
            self.fleet.ended(key, [worker_id for worker_id in ids if worker_id is not None])

    def _decide(self, request: RequestShape, now_s: float) -> Pairing | Refusal:
        pools = [(pool, self.fleet.candidates(request, pool, now_s)) for pool in self.fleet.pools(request)]
        pools = [(pool, candidates) for pool, candidates in pools if candidates.decode]
        if not pools:
            return self._refuse_all(request, now_s)
        roomy = [candidates for candidates in (with_room(request, found) for _, found in pools) if candidates.decode]
        if not roomy:
            return refuse_full(request, [decode for _, candidates in pools for decode in candidates.decode])
        return self._place(request, roomy)

    def _place(self, request: RequestShape, roomy: Sequence[Candidates]) -> Pairing | Refusal:
        """Returns the cheapest of the pools' choices, or a refusal if no pool meets the limits."""
        best = self._cheapest(request, roomy)
        if best is None and request.max_ttft_ms is None:
            best = self._cheapest(request, [without_queue(request, found) for found in roomy])
        if best is None:
            return min((refuse_late(request, found) for found in roomy), key=lambda no: no.retry_after_s or 0.0)
        choice, predicted = best
        self.fleet.sent(request, choice, roomy[0].now_s)
        return _pairing(choice, predicted)

    def _cheapest(self, request: RequestShape, roomy: Sequence[Candidates]) -> tuple[Placement, Prediction] | None:
        best: tuple[Placement, Prediction] | None = None
        for candidates in roomy:
            choice = self._policy.choose(request, candidates)
            if choice is None or _is_cut(choice, candidates.links):
                choice = cheapest(request, candidates)
            if choice is not None:
                predicted = predict(request, choice, candidates.links, candidates.now_s)
                if best is None or predicted.total_ms < best[1].total_ms:
                    best = choice, predicted
        return best

    def _refuse_all(self, request: RequestShape, now_s: float) -> Refusal:
        if request.reserved:
            return refuse_early()
        if self.fleet.is_served(request, now_s):
            return refuse_long(request)
        return refuse_dead(request, self.fleet.limits.dead_s)


def without_queue(request: RequestShape, candidates: Candidates) -> Candidates:
    """Returns the candidates with a TTFT limit that an idle worker always meets, however long the prompt takes by
    itself: retrying later would not make that shorter.
    """
    workers = candidates.prefill or candidates.decode
    alone_ms = min(w.speed.prefill.prompt_ms(request.num_tokens, num_cached_tokens(request, w.worker)) for w in workers)
    return replace(candidates, max_ttft_ms=max(candidates.max_ttft_ms, alone_ms))


def with_room(request: RequestShape, candidates: Candidates) -> Candidates:
    """Returns the candidates without decode workers that lack free blocks; a decode worker already assigned remains."""
    if request.decode_id is not None:
        return candidates
    eligible = EligibleWorkers.of(candidates.decode, candidates.links)
    num_free = eligible.columns.num_free_blocks
    num_blocks = num_blocks_of(request.num_tokens + request.num_expected_output, eligible.block_size)
    if num_free.min() >= num_blocks:
        return candidates
    return replace(candidates, decode=eligible.without(num_free < num_blocks - eligible.cached_blocks(request)))


def _is_cut(choice: Placement, links: Links) -> bool:
    """Whether the decode worker cannot reach the prefill worker (a cut link), which most policies do not check."""
    return choice.prefill is not None and choice.prefill.worker_id in links.cut_into(choice.decode.worker_id)


def _pairing(choice: Placement, predicted: Prediction) -> Pairing:
    return Pairing(
        prefill_id=None if choice.prefill is None else choice.prefill.worker_id,
        decode_id=choice.decode.worker_id,
        fetch_from_id=None if choice.holder is None else choice.holder.worker_id,
        predicted=predicted,
    )
