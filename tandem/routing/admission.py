"""Limits of admission: the reasons for a refusal, and the time to ask again.

A refusal is an answer, not an exception. `retry_after_s` comes from the queues; None means that asking again is no use.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from tandem.core.errors import ConfigurationError
from tandem.routing.candidates import Candidates, WorkerSnapshot, num_blocks_of, num_cached_blocks, num_cached_tokens
from tandem.routing.snapshot import RequestShape

_MIN_RETRY_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    """What the router tolerates. Times in seconds except where named otherwise.

    fresh_s: up to this age a report is taken at its word; older ones cost their extra age.
    dead_s: without a report for so long, a worker gets nothing.
    forget_s: without a report for so long, a worker is forgotten.
    settle_s: a request sent this long before a report's figures were asked for is counted in them.
    max_ttft_ms: requests predicted to wait longer are refused, unless they say themselves what they tolerate.
    max_local_tokens: a decode worker prefills a prompt itself when it lacks at most this much of it.
    """

    fresh_s: float = 0.75
    dead_s: float = 2.0
    forget_s: float = 60.0
    settle_s: float = 0.05
    max_ttft_ms: float = 60_000.0
    max_local_tokens: int = 512

    def __post_init__(self) -> None:
        if not 0 <= self.fresh_s <= self.dead_s <= self.forget_s:
            raise ConfigurationError(
                f"fresh_s={self.fresh_s}, dead_s={self.dead_s}, forget_s={self.forget_s}; "
                "use 0 <= fresh_s <= dead_s <= forget_s"
            )
        if self.settle_s < 0 or self.max_ttft_ms <= 0 or self.max_local_tokens < 0:
            raise ConfigurationError(f"{self} has a negative limit; use zero or more (max_ttft_ms above zero)")


class RefusalReason(StrEnum):
    """Why nobody can take a request now."""

    NO_WORKER = "no_worker"  # none is alive for its fingerprints and roles
    TOO_LONG = "too_long"  # it fits no worker even when that is empty
    NO_BLOCKS = "no_blocks"  # every decode worker's memory is taken
    QUEUE = "queue"  # the first token would come too late


@dataclass(frozen=True, slots=True)
class Refusal:
    """No, and why. `retry_after_s` None: the same request can never succeed here."""

    reason: RefusalReason
    retry_after_s: float | None
    message: str


def num_lacking_blocks(request: RequestShape, snapshot: WorkerSnapshot) -> int:
    """Blocks that a decode worker needs for the prompt it lacks and the output it may expect."""
    num_tokens = request.num_tokens + request.num_expected_output
    return num_blocks_of(num_tokens, snapshot.worker.block_size) - num_cached_blocks(request, snapshot.worker)


def refuse_dead(request: RequestShape, dead_s: float) -> Refusal:
    pool = "any pool" if request.fingerprints is None else " or ".join(sorted(request.fingerprints)) or "no pool"
    return Refusal(RefusalReason.NO_WORKER, dead_s, f"no worker of {pool} is alive and can take the request")


def refuse_long(request: RequestShape) -> Refusal:
    message = (
        f"{request.num_tokens} prompt tokens and {request.num_expected_output} of output fit no worker's cache; "
        "shorten the prompt or ask for less"
    )
    return Refusal(RefusalReason.TOO_LONG, None, message)


def refuse_full(request: RequestShape, decodes: Iterable[WorkerSnapshot]) -> Refusal:
    """All memory is taken: ask again when the first worker is expected to have freed enough."""
    retry_after_s = min(_until_room_s(request, decode) for decode in decodes)
    return Refusal(RefusalReason.NO_BLOCKS, max(_MIN_RETRY_S, retry_after_s), "every decode worker's KV cache is full")


def refuse_late(request: RequestShape, candidates: Candidates) -> Refusal:
    """The queues are too long: ask again when the shortest has drained to what is tolerated, or altogether where the
    prompt by itself takes longer than that.
    """
    soonest_ms, prompt_ms = min(
        (worker.wait_ms(candidates.now_s) + prompt_ms, prompt_ms)
        for worker in (*candidates.prefill, *candidates.decode)
        for prompt_ms in [worker.speed.prefill.prompt_ms(request.num_tokens, num_cached_tokens(request, worker.worker))]
    )
    tolerated_ms = candidates.max_ttft_ms if request.max_ttft_ms is not None else max(candidates.max_ttft_ms, prompt_ms)
    excess_s = (soonest_ms - tolerated_ms) / 1000
    message = f"the first token is {soonest_ms / 1000:.1f} s away; {candidates.max_ttft_ms / 1000:.1f} s are tolerated"
    return Refusal(RefusalReason.QUEUE, max(_MIN_RETRY_S, excess_s), message)


def _until_room_s(request: RequestShape, decode: WorkerSnapshot) -> float:
    """Running requests are half done on average and free their blocks one after another."""
    if decode.num_running == 0:
        return 0.0
    num_used = decode.worker.num_total_blocks - decode.num_free_blocks
    num_short = num_lacking_blocks(request, decode) - decode.num_free_blocks
    num_finishing = num_short * decode.num_running / max(1, num_used)
    step_ms = decode.speed.decode.step_ms(decode.num_running, decode.num_context_tokens)
    return num_finishing * (request.num_expected_output / 2) * step_ms / decode.num_running / 1000
