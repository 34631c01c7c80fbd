"""Messages between processes, as frozen values; `message_forms` has their conversions to protobuf.

Token ids, block ids and counts are plain integers, times are seconds, sizes bytes, rates bytes per second.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tandem.core.draft_counts import DraftCounts
from tandem.core.output import RequestOutput
from tandem.core.pins import Pin
from tandem.core.process_usage import ProcessUsage
from tandem.core.sampling_params import SamplingParams
from tandem.core.scope import CacheScope
from tandem.core.timeline import Stage
from tandem.kvcache.block_table import BlockRange
from tandem.routing.queue_place import QueuePlace
from tandem.routing.snapshot import WorkerState
from tandem.routing.speed import PrefillWork
from tandem.rpc.prefill_messages import ChosenToken, LeasedDraftState
from tandem.rpc.prompt_messages import NamedPrompt
from tandem.rpc.rank_messages import RankReport


@dataclass(frozen=True, slots=True)
class WorkerAddress:
    """Address (host:port) and identity of a worker. `incarnation`: random id of one run of its process; a call meant
    for another one is refused with `AnotherIncarnationError`; "" = any.
    """

    worker_id: str
    address: str
    incarnation: str = ""


# --- gateway → router -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PairCall:
    """Asks a router for the workers of a request.

    Args:
        model: served name.
        token_ids: the prompt, and the tokens generated so far if the request continues elsewhere; `array` at routers.
        num_expected_output: expected number of tokens still to be generated.
        scope: requests of the same scope share cached state.
        session_id: the client's id of its conversation, by which its requests are routed alike; None = not given.
        max_ttft_ms, max_tpot_ms: wanted time to the first token, and for each later one; None = no target.
        excluded: ids of workers that just failed this request.
        local_prefill: the decode worker must compute the prompt itself.
        fingerprint: of the model (`PairingAnswer`) that began the request; another could not continue exactly.
        told: name under which the router stores the prompt (`prompt_reuse`); removed before handlers get the call.
        place: where it waits for room, and for how long; None = it came now and asks once.
        pairing_id: as in `RequestShape`.
    """

    request_id: str
    model: str
    token_ids: Sequence[int]
    num_expected_output: int
    scope: CacheScope
    session_id: str | None = None
    max_ttft_ms: float | None = None
    max_tpot_ms: float | None = None
    excluded: tuple[str, ...] = ()
    local_prefill: bool = False
    fingerprint: str | None = None
    told: NamedPrompt | None = None
    place: QueuePlace | None = None
    pairing_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairingAnswer:
    """Workers chosen for a request, and the router's predictions.

    Args:
        prefill: None = the decode worker computes the prompt itself.
        spares: prefill workers to try when the first fails, best first.
        fetch_from: a peer from which prefill fetches `num_fetch_blocks` leading blocks instead of computing them.
        prefill_cached_blocks, decode_cached_blocks: leading blocks that each side is expected to have cached.
        predicted_ms: by stage: queue, prefill, fetch, transfer, decode, ttft, total.
        decision_s: duration of the decision in the router, including hashing and the index.
        fingerprint: of the model.
    """

    decode: WorkerAddress
    prefill: WorkerAddress | None = None
    spares: tuple[WorkerAddress, ...] = ()
    fetch_from: WorkerAddress | None = None
    num_fetch_blocks: int = 0
    prefill_cached_blocks: int = 0
    decode_cached_blocks: int = 0
    predicted_ms: Mapping[str, float] = field(default_factory=dict)
    policy: str = ""
    decision_s: float = 0.0
    fingerprint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessInfo:
    """Identity and usage of a process, for operators. `incarnation`: id of its run; `usage` None: not measured."""

    pid: int
    incarnation: str
    lifecycle: str
    usage: ProcessUsage | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One decision of a router and its outcome.

    Args:
        age_s: seconds since the decision.
        prefill_id: None = the decode worker computes the prompt, or the request was refused.
        decode_id: None = the request was refused, for the reason `refusal`.
        predicted_ms, measured_ms: by stage; stages not reached (yet) have no measured time.
    """

    request_id: str
    age_s: float
    policy: str
    prefill_id: str | None = None
    decode_id: str | None = None
    fetch_from_id: str | None = None
    refusal: str = ""
    predicted_ms: Mapping[str, float] = field(default_factory=dict)
    measured_ms: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """A model served by live workers."""

    name: str
    fingerprint: str
    max_model_len: int
    vocab_size: int
    block_size: int
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    num_prefill: int = 0
    num_decode: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerListing:
    """A worker as a router sees it, for operators and the planner.

    Args:
        age_s: seconds since its last report.
        is_alive: whether it is given requests.
        slowness: how many times as slow as its peers it is, if it is set aside for that; else None.
    """

    status: "WorkerStatus"
    age_s: float
    is_alive: bool
    slowness: float | None = None


# --- worker → router or Redis -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """Announcement of a worker, repeated until it stops. `epoch`: as in `WorkerStatus`; 0 = it does not tell."""

    worker: WorkerAddress
    role: str
    model: str
    pool: str
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class Registration:
    """Announcement of a worker to a router, without Redis. `without_records`: it does not request the other workers."""

    record: WorkerRecord
    without_records: bool = False


# --- router → worker --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkReport:
    """Measured link over which a worker reads the blocks of the worker `source_id`."""

    source_id: str
    transport: str
    path: str
    bytes_per_s: float
    latency_s: float
    is_slow: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillSample:
    """Measured engine step that computed prompts only: its work and duration."""

    work: PrefillWork
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSample:
    """Measured engine step that only decoded."""

    num_running: int
    num_context_tokens: int
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """A worker's status.

    Args:
        state: what routing needs; `state.reported_at_s` is set by the receiver from its own clock.
        lifecycle: starting, ready, recovering, draining or stopped.
        epoch: number of this run of its process, larger after each restart; reports of earlier runs are ignored.
        blocks: by state: free, cached, used, leased, transferring, pinned; they add up to the pool.
        model: what it serves.
        prefill_samples, step_samples: measured since the last report to this receiver.
        unreachable: ids of workers that this one cannot read from now.
        usage: of its process; None = it does not measure it.
        drafts: None = it does not count them.
        ranks: None = one process has the whole model.
    """

    worker: WorkerAddress
    pid: int
    epoch: int
    lifecycle: str
    state: WorkerState
    model: ModelInfo
    blocks: Mapping[str, int] = field(default_factory=dict)
    num_waiting: int = 0
    links: tuple[LinkReport, ...] = ()
    prefill_samples: tuple[PrefillSample, ...] = ()
    step_samples: tuple[StepSample, ...] = ()
    unreachable: tuple[str, ...] = ()
    usage: ProcessUsage | None = None
    drafts: DraftCounts | None = None
    ranks: RankReport | None = None


# --- gateway → decode -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeCall:
    """Common fields of calls that compute a request, whole or its prompt alone.

    Args:
        prompt_token_ids: at least one.
        output_token_ids: tokens generated before by a lost worker; generation continues after them.
        params: `n` is 1 and `seed` is set, so that any worker draws the same tokens.
        scope, prefill, fetch_from, num_fetch_blocks: as in `PairCall` and `PairingAnswer`.
        priority: lower is more urgent.
        pins: prefixes of the prompt to keep cached; the last update says what was granted (`RequestMetrics.pins`).
        told: name under which the worker stores the prompt (`prompt_reuse`); removed before handlers get the call.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    scope: CacheScope
    output_token_ids: tuple[int, ...] = ()
    priority: int = 0
    prefill: WorkerAddress | None = None
    fetch_from: WorkerAddress | None = None
    num_fetch_blocks: int = 0
    pins: tuple[Pin, ...] = ()
    told: NamedPrompt | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateCall(ComputeCall):
    """Asks a decode worker to serve a request to its end. `decode`: the worker it is meant for; `spares`: prefill
    workers to try when the first fails, best first.
    """

    decode: WorkerAddress | None = None
    spares: tuple[WorkerAddress, ...] = ()


@dataclass(frozen=True, slots=True)
class GenerateUpdate:
    """Update of a request; the last one has `output.finish_reason`, metrics and the whole timeline."""

    output: RequestOutput
    timeline: tuple[Stage, ...] = ()


# --- decode → prefill, and any worker → any worker's blocks -----------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseUpdate:
    """Reports that more blocks are readable under a lease: the sender's promise to keep their contents until it ends.

    Args:
        num_tokens: of the prompt, from its beginning, whose state the lease covers so far.
        groups: what is new, one range a KV group.
        is_last: no more will come.
        ttl_s: the lease ends this long after its last renewal.
    """

    lease_id: str
    num_tokens: int
    groups: tuple[BlockRange, ...]
    is_last: bool
    ttl_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillCall(ComputeCall):
    """Asks a prefill worker to compute a prompt, lease its blocks to `reader` and choose one token. `prefill`: the
    worker it is meant for.

    Args:
        lease_id: chosen by the reader, so that it can end a lease of which it has received no update; empty = the
            worker chooses.
        drafter: fingerprint of the reader's drafter if it would go on with the state of an equal one; else empty.
    """

    reader: WorkerAddress
    lease_id: str = ""
    drafter: str = ""


@dataclass(frozen=True, slots=True)
class PrefillUpdate:
    """Update of a prefill: a lease, the token, the drafter's state, or the final timeline. The token comes with the
    number of prompt tokens that were cached and with the granted pins.
    """

    lease: LeaseUpdate | None = None
    token: ChosenToken | None = None
    num_cached_tokens: int | None = None
    timeline: tuple[Stage, ...] = ()
    pins: tuple[Pin, ...] = ()
    draft_state: LeasedDraftState | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeting:
    """Handshake between workers: identity, address, and how to read the sender's blocks.

    Args:
        compatibility: properties that must be equal for blocks to be interchangeable, by name.
        epoch: number of the run of the sender's process; larger after each restart.
        site: where the sender runs and what it can do, by which a transport is chosen (`transport.choose.Site`).
        cards: by transport name: layout and addresses of the sender's blocks, with a MAC (`transport.card.seal`).
        num_blocks: of its pool, the null block included.
    """

    worker: WorkerAddress
    epoch: int
    protocol_version: int
    compatibility: Mapping[str, str]
    site: Mapping[str, str | bool]
    cards: Mapping[str, bytes]
    num_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseCall:
    """Asks for a lease of the blocks of the longest cached prefix of a chain of hashes; the reader chooses its id."""

    reader: WorkerAddress
    lease_id: str
    block_hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfirmCall:
    """Asks whether a lease has been valid until now, and for checksums of some blocks, one for each of `reader_ranks`
    ranks (None = one). `reader_stages`: layers with state in each of the reader's stages; () = it has no stages.
    """

    lease_id: str
    checksum_block_ids: tuple[int, ...] = ()
    reader_ranks: int | None = None
    reader_stages: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ConfirmAnswer:
    """Answer to `ConfirmCall`. `checksums`: for each of its blocks in order, the CRC-32 of the part of each of the
    reader's ranks; empty when the lease is not valid.
    """

    is_valid: bool
    checksums: tuple[int, ...] = ()
