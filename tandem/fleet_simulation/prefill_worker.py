"""Prefill worker in virtual time: one prompt after another, an LRU cache of prefixes, and hand-offs that delay its end.

A prompt's time follows the router's own model, so the router's predictions err only by missing knowledge. Chunks of a
prompt run back to back; they determine how much of a hand-off outlasts the prompt.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from tandem.fleet_simulation.events import EventQueue
from tandem.fleet_simulation.prefix_cache import SimulatedPrefixCache
from tandem.fleet_simulation.request import SimulatedRequest
from tandem.routing.speed import NO_WORK, PrefillSpeed, PrefillWork

Done = Callable[[SimulatedRequest, float], None]


@dataclass(slots=True)
class _Job:
    """A queued prompt. `expected`: its work, for reports. `num_fetched`: leading blocks at the peer that sends them;
    they arrive at `fetched_s`.
    """

    request: SimulatedRequest
    expected: PrefillWork
    done: Done
    num_fetched: int
    fetched_s: float


class PrefillWorker:
    """Computes one prompt at a time. Calls `done(request, service_s)` when a prompt's first token exists."""

    def __init__(self, events: EventQueue, speed: PrefillSpeed, num_blocks: int, block_size: int) -> None:
        self.cache = SimulatedPrefixCache(num_blocks)
        self.num_pulls = 0
        self.busy_s = 0.0
        self._events = events
        self._speed = speed
        self._block_size = block_size
        self._waiting: deque[_Job] = deque()
        self._waiting_work = NO_WORK
        self._current: _Job | None = None
        self._current_work = NO_WORK
        self._from_s = 0.0
        self._until_s = 0.0
        self._num_context_tokens = 0

    @property
    def idle(self) -> bool:
        """Whether it has nothing to compute and no hand-off in progress, so that it may be removed."""
        return self._current is None and self.num_pulls == 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._waiting) + (self._current is not None)

    @property
    def num_context_tokens(self) -> int:
        return self._num_context_tokens

    def queued(self) -> PrefillWork:
        """Prompt work not computed yet."""
        if self._current is None:
            return NO_WORK
        length_s = self._until_s - self._from_s
        left = min(1.0, (self._until_s - self._events.now_s) / length_s) if length_s > 0 else 0.0
        work = self._current_work
        rest = PrefillWork(left * work.num_requests, left * work.num_tokens, left * work.num_pairs)
        return rest + self._waiting_work if self._waiting else rest

    def prefill(self, request: SimulatedRequest, done: Done, num_fetched: int = 0, fetched_s: float = 0.0) -> None:
        """Queue a prompt."""
        held = max(num_fetched, self.cache.leading(request.recorded.block_ids))
        job = _Job(request, self._work(request, held), done, num_fetched, fetched_s)
        self._num_context_tokens += request.recorded.num_prompt_tokens
        if self._current is None:
            self._start(job)
        else:
            self._waiting.append(job)
            self._waiting_work += job.expected

    def _start(self, job: _Job) -> None:
        """Starts a job. Uses blocks that are cached now, which may be more than when it was queued."""
        now_s = self._events.now_s
        held = self.cache.leading(job.request.recorded.block_ids)
        self._from_s = now_s
        if job.num_fetched > held:
            held, self._from_s = job.num_fetched, max(now_s, job.fetched_s)
        self._current, self._current_work = job, self._work(job.request, held)
        service_s = self._speed.ms(self._current_work) / 1000
        self._until_s = self._from_s + service_s
        self.busy_s += service_s
        self._events.at(self._until_s, lambda: self._finish(job, service_s))

    def _finish(self, job: _Job, service_s: float) -> None:
        self.cache.keep(job.request.recorded.block_ids)
        self._num_context_tokens -= job.request.recorded.num_prompt_tokens
        self._current = None
        if self._waiting:
            following = self._waiting.popleft()
            work, less = self._waiting_work, following.expected
            self._waiting_work = PrefillWork(
                max(0.0, work.num_requests - less.num_requests),
                max(0.0, work.num_tokens - less.num_tokens),
                max(0.0, work.num_pairs - less.num_pairs),
            )
            self._start(following)
        job.done(job.request, service_s)

    def _work(self, request: SimulatedRequest, num_held: int) -> PrefillWork:
        num_tokens = request.recorded.num_prompt_tokens
        num_cached = min(num_held, (num_tokens - 1) // self._block_size) * self._block_size
        return PrefillWork.of(num_tokens, num_cached)
