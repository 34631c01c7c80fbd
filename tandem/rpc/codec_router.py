"""Protobuf forms of the calls to a router and their answers."""

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.core.errors import InvalidRequestError
from tandem.core.events import BlockEvent, BlockRemoved, BlockStored
from tandem.core.hashing import HASH_BYTES
from tandem.locality.base import PublishResult
from tandem.routing.snapshot import Role
from tandem.rpc.codec_common import (
    ROLES,
    maybe_address,
    maybe_usage,
    put_address,
    put_maybe_address,
    put_model,
    put_scope,
    put_status,
    put_usage,
    take_address,
    take_model,
    take_scope,
    take_status,
)
from tandem.rpc.form import (
    Names,
    finite,
    maybe_finite,
    not_empty,
    not_negative,
    pack_hashes,
    pack_token_ids,
    required,
    unpack_hashes,
    unpack_token_ids,
)
from tandem.rpc.messages import (
    Decision,
    ModelInfo,
    PairCall,
    PairingAnswer,
    ProcessInfo,
    Registration,
    Settlement,
    WorkerListing,
    WorkerRecord,
)
from tandem.rpc.v1 import router_pb2 as pb

_RESULTS = Names(
    "result",
    {
        PublishResult.APPLIED: pb.PUBLISH_RESULT_APPLIED,
        PublishResult.RESYNC: pb.PUBLISH_RESULT_RESYNC,
        PublishResult.STALE: pb.PUBLISH_RESULT_STALE,
    },
    newer=PublishResult.RESYNC,
)


MAX_DECISIONS = 4096


@dataclass(frozen=True, slots=True)
class BlockReport:
    """The arguments of `RouterHandler.publish`."""

    worker_id: str
    epoch: int
    events: Sequence[BlockEvent]
    sequence: int


@dataclass(frozen=True, slots=True)
class BlockSnapshot:
    """The arguments of `RouterHandler.replace`."""

    worker_id: str
    epoch: int
    hashes: Sequence[bytes]
    sequence: int


def put_pair_call(call: PairCall) -> pb.PairRequest:
    return pb.PairRequest(
        request_id=call.request_id,
        model=call.model,
        token_ids=pack_token_ids(call.token_ids),
        num_expected_output=call.num_expected_output,
        scope=put_scope(call.scope),
        session_id=call.session_id,
        max_ttft_ms=call.max_ttft_ms,
        max_tpot_ms=call.max_tpot_ms,
        excluded=call.excluded,
        local_prefill=call.local_prefill,
        fingerprint=call.fingerprint,
    )


def take_pair_call(message: pb.PairRequest) -> PairCall:
    return PairCall(
        request_id=not_empty("request_id", message.request_id),
        model=message.model,
        token_ids=unpack_token_ids("token_ids", message.token_ids, least=1),
        num_expected_output=message.num_expected_output,
        scope=take_scope(required(message, "scope")),
        session_id=message.session_id if message.HasField("session_id") else None,
        max_ttft_ms=maybe_finite(message, "max_ttft_ms"),
        max_tpot_ms=maybe_finite(message, "max_tpot_ms"),
        excluded=tuple(message.excluded),
        local_prefill=message.local_prefill,
        fingerprint=message.fingerprint if message.HasField("fingerprint") else None,
    )


def put_pairing(answer: PairingAnswer) -> pb.PairResponse:
    return pb.PairResponse(
        decode=put_address(answer.decode),
        prefill=put_maybe_address(answer.prefill),
        spares=map(put_address, answer.spares),
        fetch_from=put_maybe_address(answer.fetch_from),
        num_fetch_blocks=answer.num_fetch_blocks,
        prefill_cached_blocks=answer.prefill_cached_blocks,
        decode_cached_blocks=answer.decode_cached_blocks,
        predicted_ms=answer.predicted_ms,
        policy=answer.policy,
        decision_s=answer.decision_s,
        fingerprint=answer.fingerprint,
    )


def take_pairing(message: pb.PairResponse) -> PairingAnswer:
    return PairingAnswer(
        decode=take_address(required(message, "decode")),
        prefill=maybe_address(message, "prefill"),
        spares=tuple(map(take_address, message.spares)),
        fetch_from=maybe_address(message, "fetch_from"),
        num_fetch_blocks=message.num_fetch_blocks,
        prefill_cached_blocks=message.prefill_cached_blocks,
        decode_cached_blocks=message.decode_cached_blocks,
        predicted_ms={stage: finite(stage, value) for stage, value in message.predicted_ms.items()},
        policy=message.policy,
        decision_s=not_negative("decision_s", message.decision_s),
        fingerprint=message.fingerprint,
    )


def put_process(info: ProcessInfo) -> pb.DescribeResponse:
    usage = put_usage(info.usage)
    return pb.DescribeResponse(pid=info.pid, incarnation=info.incarnation, lifecycle=info.lifecycle, usage=usage)


def take_process(message: pb.DescribeResponse) -> ProcessInfo:
    usage = maybe_usage(message)
    return ProcessInfo(pid=message.pid, incarnation=message.incarnation, lifecycle=message.lifecycle, usage=usage)


def put_settlement(settlement: Settlement) -> pb.SettleRequest:
    return pb.SettleRequest(
        request_id=settlement.request_id,
        queue_ms=settlement.queue_ms,
        prefill_ms=settlement.prefill_ms,
        transfer_ms=settlement.transfer_ms,
        ttft_ms=settlement.ttft_ms,
    )


def take_settlement(message: pb.SettleRequest) -> Settlement:
    return Settlement(
        request_id=not_empty("request_id", message.request_id),
        queue_ms=maybe_finite(message, "queue_ms"),
        prefill_ms=maybe_finite(message, "prefill_ms"),
        transfer_ms=maybe_finite(message, "transfer_ms"),
        ttft_ms=maybe_finite(message, "ttft_ms"),
    )


def put_models(models: Sequence[ModelInfo]) -> pb.ModelsResponse:
    return pb.ModelsResponse(models=map(put_model, models))


def take_models(message: pb.ModelsResponse) -> Sequence[ModelInfo]:
    return tuple(map(take_model, message.models))


def _put_listing(listing: WorkerListing) -> pb.WorkerListing:
    return pb.WorkerListing(
        status=put_status(listing.status),
        age_s=listing.age_s,
        is_alive=listing.is_alive,
        slowness=listing.slowness,
    )


def _take_listing(message: pb.WorkerListing) -> WorkerListing:
    return WorkerListing(
        status=take_status(required(message, "status")),
        age_s=finite("age_s", message.age_s),
        is_alive=message.is_alive,
        slowness=finite("slowness", message.slowness) if message.HasField("slowness") else None,
    )


def put_listings(listings: Sequence[WorkerListing]) -> pb.WorkersResponse:
    return pb.WorkersResponse(workers=map(_put_listing, listings))


def take_listings(message: pb.WorkersResponse) -> Sequence[WorkerListing]:
    """NOTE: workers of a role that only newer releases know are nothing to this one."""
    return tuple(_take_listing(one) for one in message.workers if ROLES.knows(one.status.state.role))


def put_num_latest(num_latest: int) -> pb.DecisionsRequest:
    return pb.DecisionsRequest(num_latest=num_latest)


def take_num_latest(message: pb.DecisionsRequest) -> int:
    if not 1 <= message.num_latest <= MAX_DECISIONS:
        raise InvalidRequestError(f"num_latest={message.num_latest} is out of range; use 1 to {MAX_DECISIONS}")
    return message.num_latest


def _put_decision(decision: Decision) -> pb.Decision:
    return pb.Decision(
        request_id=decision.request_id,
        age_s=decision.age_s,
        policy=decision.policy,
        prefill_id=decision.prefill_id,
        decode_id=decision.decode_id,
        fetch_from_id=decision.fetch_from_id,
        refusal=decision.refusal,
        predicted_ms=decision.predicted_ms,
        measured_ms=decision.measured_ms,
    )


def _take_decision(message: pb.Decision) -> Decision:
    return Decision(
        request_id=message.request_id,
        age_s=finite("age_s", message.age_s),
        policy=message.policy,
        prefill_id=message.prefill_id if message.HasField("prefill_id") else None,
        decode_id=message.decode_id if message.HasField("decode_id") else None,
        fetch_from_id=message.fetch_from_id if message.HasField("fetch_from_id") else None,
        refusal=message.refusal,
        predicted_ms={stage: finite(stage, value) for stage, value in message.predicted_ms.items()},
        measured_ms={stage: finite(stage, value) for stage, value in message.measured_ms.items()},
    )


def put_decisions(decisions: Sequence[Decision]) -> pb.DecisionsResponse:
    return pb.DecisionsResponse(decisions=map(_put_decision, decisions))


def take_decisions(message: pb.DecisionsResponse) -> Sequence[Decision]:
    return tuple(map(_take_decision, message.decisions))


def _put_record(record: WorkerRecord) -> pb.WorkerRecord:
    return pb.WorkerRecord(
        worker=put_address(record.worker),
        role=ROLES.number(Role(record.role)),
        model=record.model,
        pool=record.pool,
    )


def _take_record(message: pb.WorkerRecord) -> WorkerRecord:
    return WorkerRecord(
        take_address(required(message, "worker")), ROLES.word(message.role).value, message.model, message.pool
    )


def put_register(registration: Registration) -> pb.RegisterRequest:
    record = _put_record(registration.record)
    return pb.RegisterRequest(record=record, without_records=registration.without_records)


def take_register(message: pb.RegisterRequest) -> Registration:
    return Registration(_take_record(required(message, "record")), message.without_records)


def put_records(records: Sequence[WorkerRecord]) -> pb.RegisterResponse:
    return pb.RegisterResponse(records=map(_put_record, records))


def take_records(message: pb.RegisterResponse) -> Sequence[WorkerRecord]:
    """NOTE: as above."""
    return tuple(_take_record(one) for one in message.records if ROLES.knows(one.role))


def put_unregister(record: WorkerRecord) -> pb.UnregisterRequest:
    return pb.UnregisterRequest(record=_put_record(record))


def take_unregister(message: pb.UnregisterRequest) -> WorkerRecord:
    return _take_record(required(message, "record"))


def _put_event(event: BlockEvent) -> pb.BlockEvent:
    if isinstance(event, BlockRemoved):
        return pb.BlockEvent(block_hash=event.block_hash, group=event.group, is_removed=True)
    return pb.BlockEvent(block_hash=event.block_hash, parent_hash=event.parent_hash, group=event.group)


def _take_event(message: pb.BlockEvent) -> BlockEvent:
    block_hash = _block_hash("block_hash", message.block_hash)
    if message.is_removed:
        return BlockRemoved(block_hash, message.group)
    parent = _block_hash("parent_hash", message.parent_hash) if message.HasField("parent_hash") else None
    return BlockStored(block_hash, parent, message.group)


def _block_hash(field: str, data: bytes) -> bytes:
    if len(data) != HASH_BYTES:
        raise InvalidRequestError(f"{field} has {len(data)} bytes; a block hash has {HASH_BYTES}")
    return data


def put_report(report: BlockReport) -> pb.PublishRequest:
    return pb.PublishRequest(
        worker_id=report.worker_id,
        epoch=report.epoch,
        events=map(_put_event, report.events),
        sequence=report.sequence,
    )


def take_report(message: pb.PublishRequest) -> BlockReport:
    return BlockReport(
        not_empty("worker_id", message.worker_id),
        message.epoch,
        tuple(map(_take_event, message.events)),
        message.sequence,
    )


def put_publish_answer(result: PublishResult) -> pb.PublishResponse:
    return pb.PublishResponse(result=_RESULTS.number(result))


def put_snapshot(snapshot: BlockSnapshot) -> pb.ReplaceRequest:
    return pb.ReplaceRequest(
        worker_id=snapshot.worker_id,
        epoch=snapshot.epoch,
        block_hashes=pack_hashes(snapshot.hashes),
        sequence=snapshot.sequence,
    )


def take_snapshot(message: pb.ReplaceRequest) -> BlockSnapshot:
    return BlockSnapshot(
        not_empty("worker_id", message.worker_id),
        message.epoch,
        unpack_hashes("block_hashes", message.block_hashes),
        message.sequence,
    )


def put_replace_answer(result: PublishResult) -> pb.ReplaceResponse:
    return pb.ReplaceResponse(result=_RESULTS.number(result))


def take_result(message: pb.PublishResponse | pb.ReplaceResponse) -> PublishResult:
    return _RESULTS.word(message.result)
