"""Decode worker in virtual time: one batch whose step time follows from its size and contexts.

All requests of a batch advance together, so time has a closed form: contexts grow by one token per step, and m steps
take about m * first + growth * m^2 / 2, where `first` is the time of the first step. A request is accepted (KV is
reserved for its whole length; whether it fits is not checked, since the router decides it), joins when its prompt's KV
is here, and is released. It waits while `max_running` others run. Only joins, ends and prompts computed here change
the batch.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable

from tandem.fleet_simulation.events import EventQueue
from tandem.fleet_simulation.request import SimulatedRequest
from tandem.routing.speed import Speed

Done = Callable[[SimulatedRequest], None]


class DecodeWorker:
    """Generates the answers of accepted requests. `ended` is called with each request that has all its tokens; it calls
    `release`.
    """

    def __init__(self, events: EventQueue, speed: Speed, num_blocks: int, max_running: int, ended: Done) -> None:
        self.num_blocks = num_blocks
        self.num_reserved_blocks = 0
        self.num_accepted = 0
        self.num_awaiting_kv = 0
        self._events = events
        self._speed = speed
        self._max_running = max_running
        self._ended = ended
        self._steps = 0.0
        self._context = 0.0
        self._at_s = 0.0
        self._resume_s = 0.0
        self._batch: list[tuple[float, int, SimulatedRequest]] = []
        self._waiting: deque[SimulatedRequest] = deque()
        self._number = 0
        self._version = 0

    @property
    def idle(self) -> bool:
        return self.num_accepted == 0

    @property
    def num_waiting(self) -> int:
        """Number of requests that have their KV but are not in the batch."""
        return len(self._waiting)

    @property
    def num_decoding(self) -> int:
        return len(self._batch)

    def num_context_tokens(self) -> float:
        """Number of context tokens of the batch now."""
        self._advance()
        return self._context

    def accept(self, request: SimulatedRequest, awaits_kv: bool) -> None:
        """Reserve KV for a request that joins later. `awaits_kv`: another worker computes its prompt, so it is counted
        as waiting for KV until then.
        """
        self.num_accepted += 1
        self.num_awaiting_kv += awaits_kv
        self.num_reserved_blocks += request.num_reserved_blocks

    def join(self, request: SimulatedRequest, awaited_kv: bool) -> None:
        """Start decoding a request whose prompt's KV is present and whose first token exists. `awaited_kv`: the same as
        `awaits_kv` when it was accepted.
        """
        self.num_awaiting_kv -= awaited_kv
        self._waiting.append(request)
        self._admit()

    def prefill(self, request: SimulatedRequest, prefill_s: float, done: Done) -> None:
        """Compute an accepted request's short prompt on this worker; the batch is stalled meanwhile. `done` is called
        when it is computed, and calls `join`.
        """
        self._advance()
        self._resume_s = max(self._events.now_s, self._resume_s) + prefill_s
        self._events.at(self._resume_s, lambda: done(request))
        self._schedule()

    def _admit(self) -> None:
        self._advance()
        while self._waiting and len(self._batch) < self._max_running:
            request = self._waiting.popleft()
            self._number += 1
            last = self._steps + max(0, request.recorded.num_output_tokens - 1)
            heapq.heappush(self._batch, (last, self._number, request))
            self._context += request.recorded.num_prompt_tokens + 1
        self._schedule()

    def _advance(self) -> None:
        """Bring the batch to the present."""
        now_s = self._events.now_s
        elapsed_ms = 1000 * (now_s - max(self._at_s, self._resume_s))
        self._at_s = now_s
        if elapsed_ms <= 0 or not self._batch:
            return
        first_ms, growth_ms = self._step()
        num_steps = (
            (math.sqrt(first_ms**2 + 2 * growth_ms * elapsed_ms) - first_ms) / growth_ms
            if growth_ms > 1e-12 * first_ms
            else elapsed_ms / first_ms
        )
        num_steps = max(0.0, min(num_steps, self._batch[0][0] - self._steps))
        self._steps += num_steps
        self._context += num_steps * len(self._batch)

    def _step(self) -> tuple[float, float]:
        """(Time of a step now, growth of the step time per step), in milliseconds."""
        decode, num = self._speed.decode, len(self._batch)
        return decode.step_ms(num, self._context), decode.ms_per_context_token * num

    def _schedule(self) -> None:
        """Schedule the next end of a request, replacing any earlier schedule."""
        self._version += 1
        if not self._batch:
            return
        version = self._version
        num_steps = self._batch[0][0] - self._steps
        first_ms, growth_ms = self._step()
        length_s = (num_steps * first_ms + growth_ms * num_steps**2 / 2) / 1000
        self._events.at(max(self._at_s, self._resume_s) + length_s, lambda: self._end(version))

    def _end(self, version: int) -> None:
        if version != self._version:
            return
        self._advance()
        last = self._batch[0][0]
        self._context += (last - self._steps) * len(self._batch)
        self._steps = last
        ended = []
        while self._batch and self._batch[0][0] <= last + 1e-9:
            request = heapq.heappop(self._batch)[2]
            self._context -= request.recorded.num_prompt_tokens + request.recorded.num_output_tokens
            ended.append(request)
        for request in ended:
            self.release(request)
            self._ended(request)
        self._admit()

    def release(self, request: SimulatedRequest) -> None:
        """Free the KV of a request that has ended here."""
        self.num_accepted -= 1
        self.num_reserved_blocks -= request.num_reserved_blocks
