"""Predicts TTFT and TPOT of a pool of given size at a given load, queueing included.

Prefill is a queue in front of several servers; decode is a batch whose size follows from Little's law. Latencies are
at the percentile of the objective, and infinite if work arrives faster than it is done.
"""

import math
from dataclasses import dataclass
from statistics import NormalDist

from tandem.planning.waiting import wait_quantile
from tandem.routing.speed import DecodeSpeed, PrefillSpeed


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedLoad:
    """Mean demand: requests per second, and the tokens of one request.

    Args:
        num_missing_tokens: prompt tokens that no cache holds.

    `num_context_tokens`: mean context of a decoding request, its prompt and half of its output.
    """

    requests_per_s: float
    num_prompt_tokens: float
    num_missing_tokens: float
    num_output_tokens: float

    @property
    def num_context_tokens(self) -> float:
        return self.num_prompt_tokens + self.num_output_tokens / 2


@dataclass(frozen=True, slots=True)
class PrefillCapacity:
    """Capacity of prefill workers of one kind.

    Args:
        speed: speed of one worker.
        variation: coefficient of variation of a prompt's time (standard deviation over mean).
        share: percentile of predicted latencies, as a share of requests: 0.95 for the 95th.
    """

    speed: PrefillSpeed
    variation: float
    share: float

    def service_ms(self, load: OfferedLoad) -> float:
        """Mean time of a prompt; the variation of lengths raises it, since attention is quadratic."""
        missing, cached = load.num_missing_tokens, load.num_prompt_tokens - load.num_missing_tokens
        pairs = missing * (cached + missing * (1 + self.variation**2) / 2)
        return self.speed.ms_per_request + self.speed.ms_per_token * missing + self.speed.ms_per_pair * pairs

    def offered(self, load: OfferedLoad) -> float:
        """Offered load: mean number of workers kept busy."""
        return load.requests_per_s * self.service_ms(load) / 1000

    def wait_ms(self, num_workers: int, offered: float, service_ms: float, backlog_ms: float = 0.0) -> float:
        """Wait that `share` of the prompts do not exceed, behind `backlog_ms` of work for the whole pool."""
        queue_ms = wait_quantile(num_workers, offered, service_ms, self.variation, self.share)
        return queue_ms + backlog_ms / num_workers

    def own_ms(self, service_ms: float) -> float:
        """Prefill time of the prompt itself at the percentile; more workers do not shorten it."""
        return service_ms * (1 + self.variation * (-math.log(1 - self.share) - 1))

    def ttft_ms(self, num_workers: int, offered: float, service_ms: float, backlog_ms: float = 0.0) -> float:
        """Wait and own time at the percentile; excesses over the means add as squares, as both rarely coincide."""
        wait_ms = self.wait_ms(num_workers, offered, service_ms)
        if math.isinf(wait_ms):
            return math.inf
        beyond_ms = math.hypot(wait_ms, self.own_ms(service_ms) - service_ms)
        return service_ms + beyond_ms + backlog_ms / num_workers


@dataclass(frozen=True, slots=True)
class Batch:
    """State of decode workers at a load.

    Args:
        num_running: mean number of requests on each worker.
        tpot_ms: time of a step at the percentile.
        kv_use, slot_use: shares of KV and of request slots in use at the percentile; above 1 means overload.
    """

    num_running: float
    tpot_ms: float
    kv_use: float
    slot_use: float

    @property
    def use(self) -> float:
        """The larger of both shares."""
        return max(self.kv_use, self.slot_use)


_OVERLOADED = Batch(math.inf, math.inf, math.inf, math.inf)


@dataclass(frozen=True, slots=True)
class DecodeCapacity:
    """Capacity of decode workers of one kind.

    Args:
        speed: speed of one worker.
        kv_tokens: tokens that one worker's KV memory holds; 0 = unknown, assumed to suffice.
        max_running: maximum number of requests that one worker runs at once.
        variation: coefficient of variation of a request's context (standard deviation over mean).
        share: percentile of predicted step times, as a share of time.
    """

    speed: DecodeSpeed
    kv_tokens: int
    max_running: int
    variation: float
    share: float

    def batch(self, num_workers: int, load: OfferedLoad, prefill_s: float = 0.0) -> Batch:
        """Steady state by Little's law: running requests = arrival rate x output length x step time.

        The step time of a request includes the requests it finds running and itself.
        `prefill_s`: time for which a request's KV is reserved here while another worker computes its prompt.
        """
        rate = load.requests_per_s / num_workers
        context = load.num_context_tokens
        growth = self.speed.ms_per_request + self.speed.ms_per_context_token * context
        tokens_per_ms = rate * load.num_output_tokens / 1000
        if tokens_per_ms * growth >= 1:
            return _OVERLOADED
        running = tokens_per_ms * (self.speed.ms_per_step + growth) / (1 - tokens_per_ms * growth)
        crowd = self._crowd(running * num_workers, num_workers)
        full = (load.num_prompt_tokens + load.num_output_tokens) * (crowd + rate * prefill_s)
        return Batch(
            num_running=running,
            tpot_ms=self.speed.step_ms(crowd, crowd * context),
            kv_use=full / self.kv_tokens if self.kv_tokens else 0.0,
            slot_use=crowd / self.max_running,
        )

    def most_running(self, load: OfferedLoad) -> float:
        """Requests that one worker holds at once, in KV and slots; at least one."""
        full = load.num_prompt_tokens + load.num_output_tokens
        fitting = self.kv_tokens / full if self.kv_tokens and full else math.inf
        return max(1.0, min(fitting, self.max_running))

    def _crowd(self, num_running: float, num_workers: int) -> float:
        """Requests on one worker at the percentile: arrivals are random, and the router balances the workers."""
        spread = NormalDist().inv_cdf(self.share) * math.sqrt(num_running * (1 + self.variation**2))
        return (num_running + spread) / num_workers
