"""Waiting and service times of prompts at several workers, over all lengths of a workload.

M/G/c: random arrivals, any lengths, first come first served by any free worker. Pure arithmetic.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from tandem.planning.profile import Profile
from tandem.planning.roofline import Roofline
from tandem.planning.waiting import mean_wait, waiting_chance


@dataclass(frozen=True)
class PrefillQueue:
    """Prompts in front of prefill workers, first come first served by any free worker.

    Args:
        prompts: (own prefill time in ms, number of chunks) of each prompt, equally likely, in ascending order.
    """

    prompts: Sequence[tuple[float, int]]
    rate_per_s: float

    @cached_property
    def services_ms(self) -> Sequence[float]:
        """Prefill time of each prompt, in ascending order."""
        return [own_ms for own_ms, _ in self.prompts]

    @cached_property
    def service_ms(self) -> float:
        """Mean prefill time of a prompt."""
        return math.fsum(self.services_ms) / len(self.prompts)

    @cached_property
    def mean_chunks(self) -> float:
        """Mean number of chunks of a prompt."""
        return math.fsum(chunks for _, chunks in self.prompts) / len(self.prompts)

    @property
    def offered(self) -> float:
        """Offered load: mean number of workers kept busy."""
        return self.rate_per_s * self.service_ms / 1000

    def service_at(self, share: float) -> float:
        """Prefill time that `share` of the prompts do not exceed."""
        return self.services_ms[max(0, math.ceil(share * len(self.services_ms)) - 1)]

    def mean_ttft_ms(self, num_workers: int) -> float:
        return self.service_ms + mean_wait(num_workers, self.offered, self.service_ms, self._variation)

    def attainment(self, num_workers: int, ttft_ms: float) -> float:
        """Share of the requests whose wait plus own time is at most `ttft_ms`."""
        if self.offered >= num_workers:
            return 0.0
        chance = waiting_chance(num_workers, self.offered)
        wait_ms = self.mean_ttft_ms(num_workers) - self.service_ms
        rate = chance / wait_ms if wait_ms > 0 else math.inf
        within = (1 - chance * math.exp(-rate * (ttft_ms - own)) for own in self.services_ms if own <= ttft_ms)
        return math.fsum(within) / len(self.services_ms)

    def ttft_at(self, num_workers: int, share: float) -> float:
        """TTFT that `share` of the requests do not exceed; infinite if work arrives faster than it is done."""
        if self.offered >= num_workers:
            return math.inf
        low, high = 0.0, 2 * self.services_ms[-1] + 1
        while self.attainment(num_workers, high) < share:
            low, high = high, 2 * high
        while high - low > 1e-4 * high:
            middle = (low + high) / 2
            low, high = (low, middle) if self.attainment(num_workers, middle) >= share else (middle, high)
        return high

    def slowed(self, extra_ms: float) -> "PrefillQueue":
        """Returns the queue with each chunk taking `extra_ms` longer."""
        return PrefillQueue(
            sorted((own_ms + chunks * extra_ms, chunks) for own_ms, chunks in self.prompts), self.rate_per_s
        )

    @cached_property
    def _variation(self) -> float:
        mean = self.service_ms
        return math.sqrt(math.fsum((s - mean) ** 2 for s in self.services_ms) / len(self.services_ms)) / mean


def prompt_queue(roofline: Roofline, profile: Profile, rate_per_s: float, chunk_tokens: int) -> PrefillQueue:
    """Queue of a workload's prompts in front of workers with this roofline."""
    prompts = []
    for length, _ in profile.lengths:
        cached = profile.cached(length)
        prompts.append((roofline.prefill_ms(length, cached), math.ceil((length - cached) / chunk_tokens)))
    return PrefillQueue(sorted(prompts), rate_per_s)
