"""Admission limits: reasons for refusing a request, and the time after which to retry.

A refusal is returned, not raised. `retry_after_s` is derived from the queues; None means that retrying cannot help.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from tandem.core.errors import ConfigurationError
from tandem.routing.candidates import Candidates, WorkerSnapshot, num_blocks_of, num_cached_blocks, num_cached_tokens
from tandem.routing.snapshot import RequestShape

_MIN_RETRY_S = 0.1  # lower bound of `retry_after_s`


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    """Limits of the router. Times are in seconds unless the name says otherwise.

    Args:
        fresh_s: a report up to this age has no penalty; beyond it, the excess age is added to the worker's cost.
        dead_s: a worker without a report for this long gets no requests.
        forget_s: a worker without a report for this long is removed.
        settle_s: a request sent at least this long before a report's figures were asked for is included in them.
        max_ttft_ms: a request predicted to wait longer is refused, unless it carries a TTFT limit of its own.
        max_local_tokens: a decode worker may prefill a prompt itself if it lacks at most this many of its tokens.
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
    """Reasons why no worker can accept a request now."""

    NO_WORKER = "no_worker"  # none is alive for its fingerprints and roles
    TOO_LONG = "too_long"  # it fits no worker even when that is empty
    NO_BLOCKS = "no_blocks"  # every decode worker's memory is taken
    QUEUE = "queue"  # the first token would come too late


@dataclass(frozen=True, slots=True)
class Refusal:
    """Refusal of a request, with its reason. `retry_after_s` None: the same request can never succeed here."""

    reason: RefusalReason
    retry_after_s: float | None
    message: str


def num_lacking_blocks(request: RequestShape, snapshot: WorkerSnapshot) -> int:
    """Blocks that a decode worker must allocate: the prompt's blocks it does not hold and the expected output's."""
    num_tokens = request.num_tokens + request.num_expected_output
    return num_blocks_of(num_tokens, snapshot.worker.block_size) - num_cached_blocks(request, snapshot.worker)


def refuse_dead(request: RequestShape, dead_s: float) -> Refusal:
    """Refusal because no worker that serves the model is alive; retry after `dead_s`."""
    pool = "any pool" if request.fingerprints is None else " or ".join(sorted(request.fingerprints)) or "no pool"
    return Refusal(RefusalReason.NO_WORKER, dead_s, f"no worker of {pool} is alive and can take the request")


def refuse_long(request: RequestShape) -> Refusal:
    """Refusal because the request is too long for every worker; it cannot be retried."""
    message = (
        f"{request.num_tokens} prompt tokens and {request.num_expected_output} of output fit no worker's cache; "
        "shorten the prompt or ask for less"
    )
    return Refusal(RefusalReason.TOO_LONG, None, message)


def refuse_full(request: RequestShape, decodes: Iterable[WorkerSnapshot]) -> Refusal:
    """Refusal because no decode worker has enough free blocks; retry when the first is expected to have them."""
    retry_after_s = min(_until_room_s(request, decode) for decode in decodes)
    return Refusal(RefusalReason.NO_BLOCKS, max(_MIN_RETRY_S, retry_after_s), "every decode worker's KV cache is full")


def refuse_early() -> Refusal:
    """Refusal because it is the turn of requests that wait for the same workers."""
    message = "free memory of workers is promised to requests that have waited longer, or that lost their worker"
    return Refusal(RefusalReason.NO_BLOCKS, _MIN_RETRY_S, message)


def refuse_late(request: RequestShape, candidates: Candidates) -> Refusal:
    """Refusal because the queues are too long for the TTFT limit.

    Retry when the shortest queue has drained enough; if the prompt alone exceeds the router's limit, when it is empty.
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
    """Expected seconds until enough blocks are free, assuming that running requests are half done on average and
    finish one after another.
    """
    if decode.num_running == 0:
        return 0.0
    num_used = decode.worker.num_total_blocks - decode.num_free_blocks
    num_short = num_lacking_blocks(request, decode) - decode.num_free_blocks
    num_finishing = num_short * decode.num_running / max(1, num_used)
    step_ms = decode.speed.decode.step_ms(decode.num_running, decode.num_context_tokens)
    return num_finishing * (request.num_expected_output / 2) * step_ms / decode.num_running / 1000
