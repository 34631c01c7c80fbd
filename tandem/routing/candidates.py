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
    """One worker as the router knows it: its last report with the requests sent since added.

    Args:
        worker_id, reported_at_s, num_total_blocks: copies of `worker`'s fields, for speed in inner loops.
        joined_step_ms: a decode step with one request more, whose context is not counted yet.
        free_at_s: when its queue of prompts will be empty.
        stale_from_s: time after which its report has a staleness penalty.
        queued, num_running, num_context_tokens, num_free_blocks, num_awaiting_kv: the report's figures with in-flight
            requests added.
        turn: number of the decision that last chose it, unique; the lowest wins a tie, so that ties rotate.
        aside_until_s: end of its ejection as an outlier: nothing is sent before, then one request at a time. -inf: in
            service.
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
        """Milliseconds that a new prompt would wait in the queue."""
        return max(0.0, 1000.0 * (self.free_at_s - now_s))

    def staleness_ms(self, now_s: float) -> float:
        """Penalty of an old report: its age beyond `stale_from_s`, for as long as it may have been wrong."""
        return max(0.0, 1000.0 * (now_s - self.stale_from_s))


@dataclass(frozen=True, slots=True)
class Placement:
    """Workers that serve a request.

    Args:
        prefill: None if the decode worker computes the prompt.
        holder: worker from which the prefill worker fetches the cached prefix, if any.
    """

    prefill: WorkerSnapshot | None
    decode: WorkerSnapshot
    holder: WorkerSnapshot | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Workers of one KV-compatibility fingerprint that may be chosen: alive, not draining, not excluded, with space.

    Args:
        holders: workers of every role, draining ones included; KV may be fetched from those that reported since
            `oldest_s`.
        max_ttft_ms: a choice with a later predicted first token is refused.
        max_local_tokens: the most missing prompt tokens that a decode worker may prefill itself.
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
    """Leading blocks that `worker` need not compute; the prompt's last token is always computed, for its logits."""
    return min(request.leading_blocks.get(worker.worker_id, 0), (request.num_tokens - 1) // worker.block_size)


def num_cached_tokens(request: RequestShape, worker: WorkerState) -> int:
    """Number of the prompt's leading tokens whose KV the worker holds."""
    return num_cached_blocks(request, worker) * worker.block_size


def num_blocks_of(num_tokens: int, block_size: int) -> int:
    """Number of blocks that hold so many tokens, the last one perhaps partly filled."""
    return -(-num_tokens // block_size)
