"""Batch size and step time of decode workers at a given load. Pure arithmetic.

Steady state by Little's law: running requests = arrival rate x output length x step time, which grows with them.
"""

import math
from dataclasses import dataclass
from statistics import NormalDist

from tandem.planning.profile import Profile
from tandem.planning.roofline import Roofline

_MOST_RUNNING = 1e6  # a larger batch counts as infinite


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """Requests that decode together in each of `num_workers`.

    Args:
        share: share of the time for which the batch is at most `crowd`: arrivals are random, and the router balances.
        busy: share of a worker's time taken by chunks of prompts.
        chunk_ms: time of one such chunk; it includes a decode step, which then need not read the weights again.
    """

    roofline: Roofline
    profile: Profile
    rate_per_s: float
    num_workers: int
    share: float
    busy: float = 0.0
    chunk_ms: float = math.inf

    def running(self) -> float:
        """Mean batch of a worker by Little's law; infinite if tokens are demanded faster than they can be generated."""
        wanted_per_ms = self.rate_per_s / self.num_workers * self.profile.mean_output / 1000
        low, high = 0.0, 1.0
        while self._tokens_per_ms(high) < wanted_per_ms:
            low, high = high, 2 * high
            if high > _MOST_RUNNING:
                return math.inf
        while high - low > 1e-6 * high:
            middle = (low + high) / 2
            low, high = (low, middle) if self._tokens_per_ms(middle) >= wanted_per_ms else (middle, high)
        return high

    def crowd(self, running: float) -> float:
        """Batch of a worker that is not exceeded for `share` of the time, given the mean batch."""
        together = running * self.num_workers
        return (together + NormalDist().inv_cdf(self.share) * math.sqrt(together)) / self.num_workers

    def step_ms(self, num_running: float) -> float:
        """Mean time between two tokens of a request, chunks of prompts included."""
        if self.busy >= 1 or math.isinf(num_running):
            return math.inf
        alone_ms = self.roofline.step_ms(num_running, self.profile.mean_context)
        with_chunks = self.busy / self.chunk_ms * (1 - self.along_ms(num_running) / alone_ms)
        return 1 / ((1 - self.busy) / alone_ms + with_chunks)

    def along_ms(self, num_running: float) -> float:
        """Time that decoding adds to a chunk in the same step: reading the KV; the weights are read anyway."""
        context = self.profile.mean_context
        return self.roofline.step_ms(num_running, context) - self.roofline.step_ms(num_running, 0)

    def kv_use(self, num_running: float, promised: float) -> float:
        """Share of the KV memory used by `num_running` requests and by `promised` more whose KV is reserved."""
        mean_bytes = self.roofline.held_bytes(self.profile.mean_context)
        memory = self.roofline.kv_memory_bytes
        return (num_running + promised) * mean_bytes / memory if memory > 0 else math.inf

    def _tokens_per_ms(self, num_running: float) -> float:
        return num_running / self.step_ms(num_running)
