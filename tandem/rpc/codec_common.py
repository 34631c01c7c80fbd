"""Protobuf forms of what both services use: addresses, models and a worker's status."""

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

from tandem.core.errors import InvalidRequestError
from tandem.core.process_usage import ProcessUsage
from tandem.core.scope import CacheScope
from tandem.routing.snapshot import Role, WorkerState
from tandem.routing.speed import PrefillWork
from tandem.rpc.form import Names, finite, maybe, not_empty, not_negative, required
from tandem.rpc.messages import LinkReport, ModelInfo, PrefillSample, StepSample, WorkerAddress, WorkerStatus
from tandem.rpc.v1 import common_pb2 as pb

_UNTOLD_AGE_S = 0.25  # NOTE: of the figures of a worker that does not tell it; no older ones are usual
ROLES = Names("role", {Role.PREFILL: pb.ROLE_PREFILL, Role.DECODE: pb.ROLE_DECODE, Role.BOTH: pb.ROLE_BOTH})
_LIFECYCLES = Names(
    "lifecycle",
    {
        "starting": pb.LIFECYCLE_STARTING,
        "ready": pb.LIFECYCLE_READY,
        "draining": pb.LIFECYCLE_DRAINING,
        "stopped": pb.LIFECYCLE_STOPPED,
    },
    newer="draining",  # NOTE: what it runs goes on, and it is given nothing new
)


def put_address(worker: WorkerAddress) -> pb.WorkerAddress:
    return pb.WorkerAddress(worker_id=worker.worker_id, address=worker.address, incarnation=worker.incarnation)


def put_maybe_address(worker: WorkerAddress | None) -> pb.WorkerAddress | None:
    return None if worker is None else put_address(worker)


def take_address(message: pb.WorkerAddress) -> WorkerAddress:
    return WorkerAddress(not_empty("worker_id", message.worker_id), message.address, message.incarnation)


def maybe_address(message: Any, field: str) -> WorkerAddress | None:
    """The worker in `field`, if one is named."""
    return maybe(message, field, take_address)


def put_scope(scope: CacheScope) -> pb.CacheScope:
    return pb.CacheScope(adapter=scope.adapter, salt=scope.salt)


def take_scope(message: pb.CacheScope) -> CacheScope:
    return CacheScope(adapter=message.adapter if message.HasField("adapter") else None, salt=message.salt)


def put_model(model: ModelInfo) -> pb.ModelInfo:
    return pb.ModelInfo(
        name=model.name,
        fingerprint=model.fingerprint,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        block_size=model.block_size,
        sampling_defaults=_put_json(model.sampling_defaults),
        num_prefill=model.num_prefill,
        num_decode=model.num_decode,
    )


def take_model(message: pb.ModelInfo) -> ModelInfo:
    return ModelInfo(
        name=message.name,
        fingerprint=message.fingerprint,
        max_model_len=message.max_model_len,
        vocab_size=message.vocab_size,
        block_size=message.block_size,
        sampling_defaults=_take_json("sampling_defaults", message.sampling_defaults),
        num_prefill=message.num_prefill,
        num_decode=message.num_decode,
    )


def _put_json(values: Mapping[str, Any]) -> bytes:
    return json.dumps(dict(values), allow_nan=False).encode() if values else b""


def _take_json(field: str, data: bytes) -> dict[str, Any]:
    if not data:
        return {}
    try:
        values = json.loads(data, parse_float=_finite_number, parse_constant=_finite_number)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{field} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise InvalidRequestError(f"{field} is a JSON {type(values).__name__}; an object is needed")
    return values


def _finite_number(text: str) -> float:
    return finite("number", float(text))


def _put_work(work: PrefillWork) -> pb.PrefillWork:
    return pb.PrefillWork(num_requests=work.num_requests, num_tokens=work.num_tokens, num_pairs=work.num_pairs)


def _take_work(message: pb.PrefillWork) -> PrefillWork:
    return PrefillWork(
        not_negative("num_requests", message.num_requests),
        not_negative("num_tokens", message.num_tokens),
        not_negative("num_pairs", message.num_pairs),
    )


def _put_state(state: WorkerState) -> pb.WorkerState:
    return pb.WorkerState(
        worker_id=state.worker_id,
        role=ROLES.number(state.role),
        kind=state.kind,
        fingerprint=state.fingerprint,
        block_size=state.block_size,
        block_bytes=state.block_bytes,
        chunk_tokens=state.chunk_tokens,
        num_total_blocks=state.num_total_blocks,
        num_free_blocks=state.num_free_blocks,
        queued=_put_work(state.queued),
        num_running=state.num_running,
        num_awaiting_kv=state.num_awaiting_kv,
        num_context_tokens=state.num_context_tokens,
        draining=state.draining,
        reported_at_s=state.reported_at_s,
        figures_age_s=state.figures_age_s,
        taken_age_s=state.taken_age_s,
    )


def _take_state(message: pb.WorkerState) -> WorkerState:
    return WorkerState(
        worker_id=not_empty("worker_id", message.worker_id),
        role=ROLES.word(message.role),
        kind=message.kind,
        fingerprint=message.fingerprint,
        block_size=message.block_size,
        block_bytes=message.block_bytes,
        chunk_tokens=message.chunk_tokens,
        num_total_blocks=message.num_total_blocks,
        num_free_blocks=message.num_free_blocks,
        queued=_take_work(message.queued),
        num_running=message.num_running,
        num_awaiting_kv=message.num_awaiting_kv,
        num_context_tokens=message.num_context_tokens,
        draining=message.draining,
        reported_at_s=message.reported_at_s,
        figures_age_s=message.figures_age_s if message.HasField("figures_age_s") else _UNTOLD_AGE_S,
        taken_age_s=message.taken_age_s,
    )


def _put_link(link: LinkReport) -> pb.LinkReport:
    return pb.LinkReport(
        source_id=link.source_id,
        transport=link.transport,
        path=link.path,
        bytes_per_s=link.bytes_per_s,
        latency_s=link.latency_s,
        is_slow=link.is_slow,
    )


def _take_link(message: pb.LinkReport) -> LinkReport:
    return LinkReport(
        source_id=not_empty("source_id", message.source_id),
        transport=message.transport,
        path=message.path,
        bytes_per_s=not_negative("bytes_per_s", message.bytes_per_s),
        latency_s=not_negative("latency_s", message.latency_s),
        is_slow=message.is_slow,
    )


def _put_prefill_sample(sample: PrefillSample) -> pb.PrefillSample:
    return pb.PrefillSample(work=_put_work(sample.work), duration_s=sample.duration_s)


def _take_prefill_sample(message: pb.PrefillSample) -> PrefillSample:
    return PrefillSample(work=_take_work(message.work), duration_s=not_negative("duration_s", message.duration_s))


def _put_step_sample(sample: StepSample) -> pb.StepSample:
    return pb.StepSample(
        num_running=sample.num_running, num_context_tokens=sample.num_context_tokens, duration_s=sample.duration_s
    )


def _take_step_sample(message: pb.StepSample) -> StepSample:
    return StepSample(
        num_running=message.num_running,
        num_context_tokens=message.num_context_tokens,
        duration_s=not_negative("duration_s", message.duration_s),
    )


def put_usage(usage: ProcessUsage | None) -> pb.ProcessUsage | None:
    return None if usage is None else pb.ProcessUsage(memory_bytes=usage.memory_bytes, cpu_cores=usage.cpu_cores)


def maybe_usage(message: Any) -> ProcessUsage | None:
    """The usage in a message that may tell it."""
    return maybe(message, "usage", _take_usage)


def _take_usage(message: pb.ProcessUsage) -> ProcessUsage:
    return ProcessUsage(message.memory_bytes, maybe(message, "cpu_cores", partial(not_negative, "cpu_cores")))


def put_status(status: WorkerStatus) -> pb.WorkerStatus:
    return pb.WorkerStatus(
        worker=put_address(status.worker),
        pid=status.pid,
        epoch=status.epoch,
        lifecycle=_LIFECYCLES.number(status.lifecycle),
        state=_put_state(status.state),
        model=put_model(status.model),
        blocks=status.blocks,
        num_waiting=status.num_waiting,
        links=[_put_link(link) for link in status.links],
        prefill_samples=[_put_prefill_sample(sample) for sample in status.prefill_samples],
        step_samples=[_put_step_sample(sample) for sample in status.step_samples],
        unreachable=status.unreachable,
        usage=put_usage(status.usage),
    )


def take_status(message: pb.WorkerStatus) -> WorkerStatus:
    return WorkerStatus(
        worker=take_address(required(message, "worker")),
        pid=message.pid,
        epoch=message.epoch,
        lifecycle=_LIFECYCLES.word(message.lifecycle),
        state=_take_state(required(message, "state")),
        model=take_model(required(message, "model")),
        blocks=dict(message.blocks),
        num_waiting=message.num_waiting,
        links=tuple(_take_link(link) for link in message.links),
        prefill_samples=tuple(_take_prefill_sample(sample) for sample in message.prefill_samples),
        step_samples=tuple(_take_step_sample(sample) for sample in message.step_samples),
        unreachable=tuple(message.unreachable),
        usage=maybe_usage(message),
    )
