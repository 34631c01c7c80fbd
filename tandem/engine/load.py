"""Load of an engine, and cost of its latest steps, measured. Workers report both; routers place requests by them."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from tandem.kvcache.manager import KVCacheManager
from tandem.kvcache.usage import HeldState, KVCacheUsage
from tandem.scheduler.output import SchedulerOutput
from tandem.scheduler.request import Request, RequestState

MAX_STEP_STATS = 256  # older ones are dropped


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """Totals over the requests that were accepted and have not finished, and the KV that they hold.

    Args:
        num_waiting, num_awaiting_kv: requests without blocks, and requests whose KV is yet to come from another worker.
        num_context_tokens: prompt and output tokens of all of them.
        num_prompts, num_prompt_tokens, num_prompt_pairs: prompts still to compute here, their missing tokens, and the
            query-key pairs attention has to visit for these.
        num_unpromised_blocks: free or evictable, and promised to no request.
        usage: of the whole KV cache.
        held: state that these requests hold, in bytes.
    """

    num_requests: int
    num_waiting: int
    num_awaiting_kv: int
    num_context_tokens: int
    num_prompts: int
    num_prompt_tokens: int
    num_prompt_pairs: float
    num_unpromised_blocks: int
    usage: KVCacheUsage
    held: HeldState


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """Work of one step and its duration: prompts and decodes.

    Args:
        num_prompts: prompts that end in this step.
        num_prompt_tokens, num_prompt_pairs: prompt tokens computed, and the query-key pairs that attention visits.
        num_decodes, num_context_tokens: requests that decode, and their tokens in context.
        num_drafts, num_accepted: drafts that it computed, and those of them that became tokens.
        read_bytes: state that the decodes read, drafts not counted.
        duration_s: as if on the worker's own cores alone. The time that cores lent by other workers saved is added,
            since the next step may not have them.
    """

    num_prompts: int
    num_prompt_tokens: int
    num_prompt_pairs: float
    num_decodes: int
    num_context_tokens: int
    num_drafts: int = 0
    num_accepted: int = 0
    read_bytes: float = 0.0
    duration_s: float = 0.0

    @property
    def token_s(self) -> float:
        """Seconds for one token of every decode, in a step without prompts. Accepted drafts count as tokens."""
        return self.duration_s * self.num_decodes / (self.num_decodes + self.num_accepted)


class StepLog:
    """The latest steps not yet taken, at most `MAX_STEP_STATS`. Used by the engine's thread."""

    def __init__(self) -> None:
        self._steps: deque[StepStats] = deque(maxlen=MAX_STEP_STATS)

    def note(self, stats: StepStats) -> None:
        """Record a step."""
        self._steps.append(stats)

    def add(self, seconds: float) -> None:
        """Add seconds spent after the last step to its duration, unless it was taken."""
        if self._steps:
            last = self._steps[-1]
            self._steps[-1] = replace(last, duration_s=last.duration_s + seconds)

    def take(self) -> list[StepStats]:
        """The steps recorded since the last call."""
        steps = list(self._steps)
        self._steps.clear()
        return steps


def load_of(requests: Iterable[Request], kv: KVCacheManager) -> EngineLoad:
    """The load that `requests` cause together."""
    num_requests = num_waiting = num_awaiting_kv = num_context = num_prompts = num_tokens = 0
    num_pairs = 0.0
    positions = {}
    for request in requests:
        positions[request.request_id] = request.num_computed_tokens
        num_requests += 1
        num_waiting += request.state is RequestState.WAITING
        num_awaiting_kv += request.num_expected_tokens > 0 and request.state is not RequestState.RUNNING
        num_context += request.num_tokens
        computed = max(request.num_computed_tokens, min(request.num_expected_tokens, request.num_tokens - 1))
        missing = request.num_tokens - computed
        if missing > 1:
            num_prompts += 1
            num_tokens += missing
            num_pairs += missing * (computed + missing / 2)
    return EngineLoad(
        num_requests=num_requests,
        num_waiting=num_waiting,
        num_awaiting_kv=num_awaiting_kv,
        num_context_tokens=num_context,
        num_prompts=num_prompts,
        num_prompt_tokens=num_tokens,
        num_prompt_pairs=num_pairs,
        num_unpromised_blocks=kv.num_unpromised,
        usage=kv.usage,
        held=kv.held_state(positions),
    )


def stats_of(step: SchedulerOutput, requests: Sequence[Request], read_bytes: Callable[[int], float]) -> StepStats:
    """The work of a step, before it is computed. `requests`: those of `step.scheduled`, in their order. `read_bytes`:
    returns the bytes of KV that the next token reads, given the number of tokens in the context.
    """
    num_bytes = 0.0
    num_prompts = num_tokens = num_decodes = num_context = num_drafts = 0
    num_pairs = 0.0
    for item, request in zip(step.scheduled, requests, strict=True):
        if request.is_decoding:
            num_decodes += 1
            num_context += item.end - item.num_drafts
            num_bytes += read_bytes(item.end - item.num_drafts)
            num_drafts += item.num_drafts
        else:
            num_prompts += item.samples
            num_tokens += item.num_tokens
            num_pairs += item.num_tokens * (item.start + item.num_tokens / 2)
    return StepStats(
        num_prompts=num_prompts,
        num_prompt_tokens=num_tokens,
        num_prompt_pairs=num_pairs,
        num_decodes=num_decodes,
        num_context_tokens=num_context,
        num_drafts=num_drafts,
        read_bytes=num_bytes,
    )
