"""Batch size and step time of decode workers at a given load. Pure arithmetic.

The steady state of Little's law: requests running = arrivals x answer's length x time of a step, which grows with them.
"""

import math
from dataclasses import dataclass
from statistics import NormalDist

from tandem.planning.profile import Profile
from tandem.planning.roofline import Roofline

_MOST_RUNNING = 1e6


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """Requests that decode together in each of `num_workers`.

    Args:
        share: of the time for which `crowd` is the batch at most: arrivals are random, the router levels the workers.
        busy: share of a worker's time that chunks of prompts take.
        chunk_ms: of one such chunk; a decode step goes along with each, and needs no sweep of the weights.
    """

    roofline: Roofline
    profile: Profile
    rate_per_s: float
    num_workers: int
    share: float
    busy: float = 0.0
    chunk_ms: float = math.inf

    def running(self) -> float:
        """Mean batch of a worker by Little's law; infinite when tokens are wanted faster than they come."""
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
        """Time that a step adds to a chunk in the same step: its KV is read, the weights are being read anyway."""
        context = self.profile.mean_context
        return self.roofline.step_ms(num_running, context) - self.roofline.step_ms(num_running, 0)

    def kv_use(self, num_running: float, promised: float) -> float:
        """Share of the KV memory that so many requests take; `promised` more have theirs reserved already."""
        mean_bytes = self.roofline.model.kv_bytes(self.profile.mean_context)
        memory = self.roofline.kv_memory_bytes
        return (num_running + promised) * mean_bytes / memory if memory > 0 else math.inf

    def _tokens_per_ms(self, num_running: float) -> float:
        return num_running / self.step_ms(num_running)
