"""The router service: computes pairings from worker reports and the locality index, and handles the router's RPCs.

Invariant: it is on the control path only and keeps no state that must not be lost; a new replica decides like any other
after a second. Even if the index or discovery fails, a request is paired while a live worker can serve it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tandem.core.chain_hasher import ChainHasher
from tandem.core.clock import Clock, SystemClock
from tandem.core.errors import (
    CapacityError,
    ConfigurationError,
    InvalidRequestError,
    NoRoomError,
    TandemError,
    UnavailableError,
    shown,
)
from tandem.core.events import BlockEvent
from tandem.core.machine import monotonic_s, process_id, random_id
from tandem.core.process_usage import UsageMeter
from tandem.kvcache.checkpoints import checkpoint_blocks
from tandem.locality.base import PublishResult
from tandem.process.discovery import Discovery
from tandem.process.fleet_view import Chain, FleetView
from tandem.process.fleet_watch import FleetWatch
from tandem.router.metrics import RouterMetrics
from tandem.router.prefix_lookup import PrefixLookup
from tandem.router.sent_prompts import SentPrompts
from tandem.routing.admission import Refusal, RefusalReason
from tandem.routing.candidates import num_cached_blocks
from tandem.routing.cost import Prediction
from tandem.routing.pairing import DecisionRecord, Pairer, Pairing
from tandem.routing.queue_place import QueuePlace
from tandem.routing.settlement import Settlement
from tandem.routing.snapshot import RequestShape
from tandem.routing.waiting import WaitingRequests
from tandem.rpc.messages import (
    Decision,
    ModelInfo,
    PairCall,
    PairingAnswer,
    ProcessInfo,
    Registration,
    WorkerListing,
    WorkerRecord,
)

NUM_SPARES = 2  # further prefill workers named in an answer


class RouterService:
    """`RouterHandler` of this router; `rpc.handlers` describes its methods and their callers. Used by one event loop;
    owns none of its parts.

    Args:
        registry: where `register` goes; None where workers announce themselves in Redis.
        incarnation: of this process; None = a new one.
    """

    def __init__(
        self,
        view: FleetView,
        watch: FleetWatch,
        pairer: Pairer,
        lookup: PrefixLookup,
        registry: Discovery | None,
        metrics: RouterMetrics,
        clock: Clock | None = None,
        incarnation: str | None = None,
    ) -> None:
        self._view = view
        self._watch = watch
        self._pairer = pairer
        self._lookup = lookup
        self._registry = registry
        self._metrics = metrics
        self._clock = clock or SystemClock()
        self._meter = UsageMeter(self._clock)
        self._hasher = ChainHasher()
        self._sent = SentPrompts()
        self._waiting = WaitingRequests()
        self._incarnation = incarnation or random_id()

    async def pair(self, call: PairCall) -> PairingAnswer:
        started_s = monotonic_s()
        chains = self._view.chains(call.model)
        if not chains:
            raise self._nobody(call.model)
        if call.fingerprint is not None:
            chains = [chain for chain in chains if chain.model_fingerprint == call.fingerprint]
        self._sent.forget(call.pairing_id or call.request_id)
        hashed = [
            (chain, self._hasher.hashes(chain.root(call.scope), call.token_ids, chain.block_size)) for chain in chains
        ]
        shape = _shape_of(call, chains, await self._leading(hashed, len(call.token_ids)))
        answer = self._pair_in_turn(call, shape)
        duration_s = monotonic_s() - started_s
        policy = self._pairer.policy_name
        if isinstance(answer, Refusal):
            self._metrics.decided(policy, answer.reason, duration_s)
            raise _error_of(answer, call.model)
        self._metrics.decided(policy, "paired", duration_s)
        self._remember(shape, answer, hashed)
        return self._answer(shape, answer, policy, duration_s)

    def _pair_in_turn(self, call: PairCall, shape: RequestShape) -> Pairing | Refusal:
        """A pairing that leaves room to requests that have to be served first, also at other gateways."""
        now_s, place = self._clock.now_s(), call.place or QueuePlace()
        reserved = self._waiting.reserved(place, shape, self._pairer.fleet, now_s)
        answer = self._pairer.pair(replace(shape, reserved=reserved), now_s)
        if not isinstance(answer, Refusal):
            self._waiting.asked(place, shape, now_s, lacks_room=False)
        elif answer.reason is RefusalReason.NO_BLOCKS:
            self._waiting.asked(place, shape, now_s, lacks_room=True)
        return answer

    async def settle(self, settlement: Settlement) -> None:
        if settlement.ttft_ms is None:
            self._sent.forget(settlement.key)
        record = self._pairer.settle(settlement)
        if record is not None:
            self._metrics.settled(record.ttft_error_ms)

    async def describe(self) -> ProcessInfo:
        usage = self._meter.read()
        return ProcessInfo(pid=process_id(), incarnation=self._incarnation, lifecycle="ready", usage=usage)

    async def models(self) -> Sequence[ModelInfo]:
        return self._view.models()

    async def workers(self) -> Sequence[WorkerListing]:
        return self._view.listings()

    async def register(self, registration: Registration) -> Sequence[WorkerRecord]:
        registry = self._own_registry()
        await registry.announce(registration.record)
        if not self._view.is_alive_at(registration.record.worker.address):
            self._watch.wake()
        return () if registration.without_records else await registry.workers()

    async def unregister(self, worker: WorkerRecord) -> None:
        await self._own_registry().withdraw(worker)

    async def publish(self, worker_id: str, epoch: int, events: Sequence[BlockEvent], sequence: int) -> PublishResult:
        self._require_own_index()
        return await self._lookup.publish(worker_id, epoch, events, sequence)

    async def replace(self, worker_id: str, epoch: int, hashes: Sequence[bytes], sequence: int) -> PublishResult:
        self._require_own_index()
        return await self._lookup.replace(worker_id, epoch, hashes, sequence)

    async def decisions(self, num_latest: int) -> Sequence[Decision]:
        now_s = self._clock.now_s()
        return [_decision_of(record, now_s) for record in self._pairer.records()[-num_latest:]]

    async def _leading(self, hashed: Sequence[tuple[Chain, Sequence[bytes]]], num_tokens: int) -> Mapping[str, int]:
        """Returns the number of leading blocks of the prompt that each worker holds or will soon hold; each version of
        a model has its own hashes.
        """
        leading: dict[str, int] = {}
        for chain, hashes in hashed:
            most = (num_tokens - 1) // chain.block_size  # NOTE: one token is left to compute
            found = await self._resumable(hashes[:most], await self._lookup.leading_blocks(hashes))
            found = self._sent.credit(hashes, found, self._clock.now_s())
            if len(hashed) == 1:
                return found
            leading.update({name: count for name, count in found.items() if self._view.is_of(name, chain)})
        return leading

    async def _resumable(self, hashes: Sequence[bytes], leading: Mapping[str, int]) -> Mapping[str, int]:
        """Returns `leading`, lowered to the last block after which a request can continue, for workers that report
        these blocks.
        """
        named = {name: min(count, len(hashes)) for name, count in leading.items() if self._names_states(name)}
        if not named:
            return leading
        found = await self._lookup.resumable_blocks(hashes, named)
        return {name: count for name, count in leading.items() if name not in named} | dict(found)

    def _names_states(self, worker_id: str) -> bool:
        snapshot = self._pairer.fleet.snapshot(worker_id)
        return snapshot is not None and snapshot.worker.names_states

    def _keeps_states(self, worker_id: str) -> bool:
        """Whether the worker's model has constant states, of which it keeps a few, and not only windowed layers."""
        snapshot = self._pairer.fleet.snapshot(worker_id)
        return snapshot is not None and snapshot.worker.names_states and snapshot.worker.request_bytes > 0

    def _remember(self, shape: RequestShape, pairing: Pairing, hashed: Sequence[tuple[Chain, Sequence[bytes]]]) -> None:
        """Record the workers that will hold this prompt, until the index knows. Of recurrent states the worker that
        computes the prompt keeps some, and the decode worker gets the last one.
        """
        worker_ids = [worker_id for worker_id in (pairing.prefill_id, pairing.decode_id) if worker_id is not None]
        for chain, hashes in hashed:
            if self._view.is_of(pairing.decode_id, chain):
                ends: Sequence[int] | None = None
                if self._keeps_states(pairing.decode_id):
                    worker_ids = worker_ids[:1]
                    ends = [index + 1 for index in checkpoint_blocks(shape.num_tokens, (), chain.block_size)]
                self._sent.sent(shape.key, hashes, worker_ids, self._clock.now_s(), ends)

    def _answer(self, shape: RequestShape, pairing: Pairing, policy: str, duration_s: float) -> PairingAnswer:
        fleet, where = self._pairer.fleet, self._view.address_of
        prefill_id, holder_id = pairing.prefill_id, pairing.fetch_from_id
        spares: Sequence[str] = ()
        if prefill_id is not None:
            spares = fleet.spares(shape, prefill_id, pairing.decode_id, self._clock.now_s(), NUM_SPARES)
        return PairingAnswer(
            decode=where(pairing.decode_id),
            prefill=None if prefill_id is None else where(prefill_id),
            spares=tuple(map(where, spares)),
            fetch_from=None if holder_id is None else where(holder_id),
            num_fetch_blocks=self._num_cached(shape, holder_id),
            prefill_cached_blocks=self._num_cached(shape, prefill_id),
            decode_cached_blocks=self._num_cached(shape, pairing.decode_id),
            predicted_ms=_stages_of(pairing.predicted),
            policy=policy,
            decision_s=duration_s,
            fingerprint=self._view.model_fingerprint(pairing.decode_id),
        )

    def _num_cached(self, shape: RequestShape, worker_id: str | None) -> int:
        snapshot = None if worker_id is None else self._pairer.fleet.snapshot(worker_id)
        return 0 if snapshot is None else num_cached_blocks(shape, snapshot.worker)

    def _nobody(self, model: str) -> UnavailableError:
        """Error for a model without workers. Not the caller's fault: the gateway has checked the name."""
        known = self._view.known_models()
        if model in known:
            message = f"all workers of the model {shown(model)} have stopped answering; try again in a moment"
        else:
            message = f"no worker of the model {shown(model)} has joined; models served: {', '.join(known) or 'none'}"
        return UnavailableError(message, self._pairer.fleet.limits.dead_s)

    def _own_registry(self) -> Discovery:
        if self._registry is None:
            raise ConfigurationError("this router finds workers in Redis; start the worker with the same --redis")
        return self._registry

    def _require_own_index(self) -> None:
        if self._lookup.is_remote:
            raise ConfigurationError("this router's locality index is in Redis; start the worker with the same --redis")


def _shape_of(call: PairCall, chains: Sequence[Chain], leading: Mapping[str, int]) -> RequestShape:
    return RequestShape(
        request_id=call.request_id,
        num_tokens=len(call.token_ids),
        num_expected_output=call.num_expected_output,
        leading_blocks=leading,
        fingerprints=frozenset[str]().union(*(chain.pools for chain in chains)),
        session_id=call.session_id,
        max_ttft_ms=call.max_ttft_ms,
        max_tpot_ms=call.max_tpot_ms,
        excluded=frozenset(call.excluded),
        local_prefill=call.local_prefill,
        pairing_id=call.pairing_id,
    )


def _decision_of(record: DecisionRecord, now_s: float) -> Decision:
    decision = Decision(
        request_id=record.request_id,
        age_s=now_s - record.decided_at_s,
        policy=record.policy,
        measured_ms={} if record.outcome is None else _measured_ms(record.outcome),
    )
    answer = record.answer
    if isinstance(answer, Refusal):
        return replace(decision, refusal=answer.message)
    return replace(
        decision,
        prefill_id=answer.prefill_id,
        decode_id=answer.decode_id,
        fetch_from_id=answer.fetch_from_id,
        predicted_ms=_stages_of(answer.predicted),
    )


def _measured_ms(outcome: Settlement) -> Mapping[str, float]:
    """Milliseconds of each stage that was reached."""
    stages = {
        "queue": outcome.queue_ms,
        "prefill": outcome.prefill_ms,
        "transfer": outcome.transfer_ms,
        "ttft": outcome.ttft_ms,
    }
    return {stage: value for stage, value in stages.items() if value is not None}


def _stages_of(predicted: Prediction) -> Mapping[str, float]:
    return {
        "queue": predicted.queue_ms,
        "prefill": predicted.prefill_ms,
        "fetch": predicted.fetch_ms,
        "transfer": predicted.transfer_ms,
        "decode": predicted.decode_ms,
        "ttft": predicted.ttft_ms,
        "total": predicted.total_ms,
    }


def _error_of(refusal: Refusal, model: str) -> TandemError:
    """A refusal as the error that the caller's client sees."""
    message = f"model {shown(model)}: {refusal.message}"
    if refusal.reason is RefusalReason.TOO_LONG:
        return InvalidRequestError(message)
    if refusal.reason is RefusalReason.NO_WORKER:
        return UnavailableError(f"no running worker takes requests for model {shown(model)} now", refusal.retry_after_s)
    kind = NoRoomError if refusal.reason is RefusalReason.NO_BLOCKS else CapacityError
    return kind(message, refusal.retry_after_s)
