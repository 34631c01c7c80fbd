"""Arrival times: open-loop processes as endless iterators of seconds, and a closed loop driven by completions.

Randomness is an argument: the same seed gives the same arrivals.
"""

import heapq
import random
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import count, groupby

from tandem.core.errors import ConfigurationError
from tandem.workload.trace import MOONCAKE_TICK_S, TraceRequest


def poisson(rate_per_s: float, source: random.Random) -> Iterator[float]:
    """Arrival times of a Poisson process, in seconds."""
    return bursts(rate_per_s, 1.0, source)


def bursts(rate_per_s: float, variation: float, source: random.Random) -> Iterator[float]:
    """Arrival times with gamma-distributed gaps whose standard deviation is `variation` times their mean. 1 is Poisson;
    more is bursty.

    Raises:
        ConfigurationError: a parameter is not above zero.
    """
    if not (rate_per_s > 0 and variation > 0):
        raise ConfigurationError(f"rate_per_s={rate_per_s}, variation={variation}; both must be above zero")
    return _gamma_gaps(rate_per_s, variation, source)


def evenly(rate_per_s: float) -> Iterator[float]:
    """Arrival times with equal gaps.

    Raises:
        ConfigurationError: the rate is not above zero.
    """
    if not rate_per_s > 0:
        raise ConfigurationError(f"rate_per_s={rate_per_s}; it must be above zero")
    return (number / rate_per_s for number in count())


def spread_in_ticks(
    requests: Iterable[TraceRequest], source: random.Random, tick_s: float = MOONCAKE_TICK_S
) -> Iterator[TraceRequest]:
    """Spreads arrivals recorded in ticks uniformly over their tick, in order again; reports should mention it."""
    for start_s, together in groupby(requests, key=lambda request: request.arrival_s // tick_s * tick_s):
        group = list(together)
        times = sorted(start_s + source.random() * tick_s for _ in group)
        yield from (replace(request, arrival_s=at_s) for request, at_s in zip(group, times, strict=True))


class ClosedLoop:
    """A fixed number of clients, each sending again `think_s` (mean of an exponential distribution) after its answer.

    Call `next_arrival_s` while it is not None, and report every end; a client waits in between.
    """

    def __init__(self, num_clients: int, think_s: float, source: random.Random) -> None:
        if num_clients < 1 or think_s < 0:
            raise ConfigurationError(f"num_clients={num_clients}, think_s={think_s}; use 1 or more, and 0 or more")
        self._think_s = think_s
        self._source = source
        self._due_s = [self._pause_s() for _ in range(num_clients)]
        heapq.heapify(self._due_s)

    def next_arrival_s(self) -> float | None:
        """Removes and returns the next arrival; None while every client waits for its answer."""
        return heapq.heappop(self._due_s) if self._due_s else None

    def ended(self, at_s: float) -> None:
        """Records that an answer, or a refusal, has reached its client."""
        heapq.heappush(self._due_s, at_s + self._pause_s())

    def _pause_s(self) -> float:
        return self._source.expovariate(1 / self._think_s) if self._think_s else 0.0


def _gamma_gaps(rate_per_s: float, variation: float, source: random.Random) -> Iterator[float]:
    shape = 1 / variation**2
    now_s = 0.0
    while True:
        now_s += source.gammavariate(shape, 1 / (shape * rate_per_s))
        yield now_s
