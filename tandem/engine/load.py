"""An engine's load and the cost of its steps, which routers use to place requests."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from tandem.kvcache.manager import KVCacheManager
from tandem.kvcache.usage import HeldState, KVCacheUsage
from tandem.scheduler.output import SchedulerOutput
from tandem.scheduler.request import Request, RequestState

MAX_STEP_STATS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """Accepted and not finished.

    num_waiting, num_awaiting_kv: of `num_requests`, those without blocks, those whose prompt comes from elsewhere.
    num_prompts, num_prompt_tokens, num_prompt_pairs: prompts still to compute here, their missing tokens, and the
    query-key pairs attention has to visit for those. num_unpromised_blocks: free or evictable, and promised to nobody.
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
    """One step: the prompt work in it (as in `EngineLoad`; prompts count when they end), its decodes, its duration.

    num_drafts, num_accepted: drafts that it computed, and those of them that became tokens.
    read_bytes: state that the decodes read, drafts not counted.
    duration_s: on the worker's own cores alone; what borrowed ones took off it is added, as who has them next time may
    be somebody else.
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
        """Seconds for one token of every decode, of a step that only decoded; drafts may have brought more than one."""
        return self.duration_s * self.num_decodes / (self.num_decodes + self.num_accepted)


class StepLog:
    """The latest `MAX_STEP_STATS` steps that nobody has taken. Used by the thread that steps."""

    def __init__(self) -> None:
        self._steps: deque[StepStats] = deque(maxlen=MAX_STEP_STATS)

    def note(self, stats: StepStats) -> None:
        """Record a step."""
        self._steps.append(stats)

    def add(self, seconds: float) -> None:
        """Count time behind the last step as its own, unless it was taken."""
        if self._steps:
            last = self._steps[-1]
            self._steps[-1] = replace(last, duration_s=last.duration_s + seconds)

    def take(self) -> list[StepStats]:
        """The steps since the last call."""
        steps = list(self._steps)
        self._steps.clear()
        return steps


def load_of(requests: Iterable[Request], kv: KVCacheManager) -> EngineLoad:
    """The sum over `requests`."""
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
    """The work of a step, before it is computed. `requests`: of `step.scheduled`, in their order. `read_bytes`: as in
    `ModelIdentity`.
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
