"""Candidates of a pairing decision: each worker's last report plus the requests sent to it since, frozen.

Nothing here chooses; `fleet` takes the snapshots, `cost` prices them and policies pick among them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tandem.routing.snapshot import Links, RequestShape, WorkerState
from tandem.routing.speed import PrefillWork, Speed


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """One worker, as far as the router knows.

    worker_id, reported_at_s, num_total_blocks: the worker's, at hand for a decision's inner loops.
    joined_step_ms: a decode step with one request more, whose context is not counted yet.
    free_at_s: when its queue of prompts will be empty.
    stale_from_s: from when its report is too old to be taken at its word.
    queued, num_running, num_context_tokens, num_free_blocks, num_awaiting_kv: the report's figures with in-flight
        requests added.
    turn: when it was last chosen; among equals the lowest goes first, so nobody is preferred for ever. Unique.
    aside_until_s: set aside for being slow: nothing is sent before, then one request at a time. -inf: in service.
    """

    worker: WorkerState
    speed: Speed
    worker_id: str
    reported_at_s: float
    num_total_blocks: int
    joined_step_ms: float
    free_at_s: float
    stale_from_s: float
    queued: PrefillWork
    num_running: int
    num_context_tokens: int
    num_free_blocks: int
    num_awaiting_kv: int = 0
    turn: int = 0
    aside_until_s: float = -math.inf

    def wait_ms(self, now_s: float) -> float:
        """How long a prompt would wait for those before it."""
        return max(0.0, 1000.0 * (self.free_at_s - now_s))

    def staleness_ms(self, now_s: float) -> float:
        """What an old report costs: its age beyond what is normal, for that long it may have been wrong."""
        return max(0.0, 1000.0 * (now_s - self.stale_from_s))


@dataclass(frozen=True, slots=True)
class Placement:
    """Who serves a request. `prefill` None: decode computes the prompt. `holder`: prefill fetches the prefix there."""

    prefill: WorkerSnapshot | None
    decode: WorkerSnapshot
    holder: WorkerSnapshot | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Workers of one fingerprint that may be chosen: alive, not draining, not excluded, with room.

    holders: who may be fetched from if it reported since `oldest_s`, whatever its role; draining ones are among them.
    max_ttft_ms: a choice predicted to take longer is refused. max_local_tokens: what decode may prefill itself.
    """

    prefill: Sequence[WorkerSnapshot]
    decode: Sequence[WorkerSnapshot]
    holders: Mapping[str, WorkerSnapshot] = field(default_factory=dict)
    links: Links
    now_s: float
    oldest_s: float = float("-inf")
    max_ttft_ms: float = float("inf")
    max_local_tokens: int = 512


def num_cached_blocks(request: RequestShape, worker: WorkerState) -> int:
    """Leading blocks `worker` can skip; the prompt's last token is always computed, for its logits."""
    return min(request.leading_blocks.get(worker.worker_id, 0), (request.num_tokens - 1) // worker.block_size)


def num_cached_tokens(request: RequestShape, worker: WorkerState) -> int:
    return num_cached_blocks(request, worker) * worker.block_size


def num_blocks_of(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)
