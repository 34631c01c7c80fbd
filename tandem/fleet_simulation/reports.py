"""Reports of simulated workers to the router, in the form that real workers report."""

from tandem.fleet_simulation.decode_worker import DecodeWorker
from tandem.fleet_simulation.prefill_worker import PrefillWorker
from tandem.fleet_simulation.replicas import SimulatedReplica
from tandem.fleet_simulation.setting import SimulationSetting
from tandem.routing.snapshot import Role, WorkerState

_FINGERPRINT = "model"


def prefill_report(replica: SimulatedReplica[PrefillWorker], setting: SimulationSetting, now_s: float) -> WorkerState:
    """Report of a prefill worker. All of its KV counts as free, since cached prefixes can be evicted."""
    worker, num_blocks = replica.worker, setting.prefill_kv_tokens // setting.block_size
    return WorkerState(
        worker_id=replica.replica_id,
        role=Role.PREFILL,
        kind="prefill",
        fingerprint=_FINGERPRINT,
        block_size=setting.block_size,
        block_bytes=setting.block_bytes,
        chunk_tokens=setting.chunk_tokens,
        num_total_blocks=num_blocks,
        num_free_blocks=num_blocks,
        queued=worker.queued(),
        num_running=worker.num_running,
        num_context_tokens=worker.num_context_tokens,
        draining=replica.draining,
        reported_at_s=now_s,
    )


def decode_report(replica: SimulatedReplica[DecodeWorker], setting: SimulationSetting, now_s: float) -> WorkerState:
    """Report of a decode worker. Blocks are reserved for a request's whole length."""
    worker = replica.worker
    return WorkerState(
        worker_id=replica.replica_id,
        role=Role.DECODE,
        kind="decode",
        fingerprint=_FINGERPRINT,
        block_size=setting.block_size,
        block_bytes=setting.block_bytes,
        chunk_tokens=setting.chunk_tokens,
        num_total_blocks=worker.num_blocks,
        num_free_blocks=max(0, worker.num_blocks - worker.num_reserved_blocks),
        num_running=worker.num_accepted,
        num_context_tokens=round(worker.num_context_tokens()),
        num_awaiting_kv=worker.num_awaiting_kv,
        draining=replica.draining,
        reported_at_s=now_s,
    )
