"""Predicts TTFT and TPOT of a pool of given size at a given load, queueing included.

Prefill is a queue in front of several servers; decode is a batch whose size follows from Little's law. Latencies are of
the percentile that the objective is for, and infinite when work arrives faster than it is done.
"""

import math
from dataclasses import dataclass
from statistics import NormalDist

from tandem.planning.waiting import wait_quantile
from tandem.routing.speed import DecodeSpeed, PrefillSpeed


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedLoad:
    """Mean demand: requests a second, and the tokens of one request.

    num_missing_tokens: of the prompt, those that no cache has. num_context_tokens: of a request that decodes, in the
    middle of its answer.
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
    """Prefill workers of one kind.

    Args:
        speed: of one worker.
        variation: of a prompt's time: standard deviation over mean.
        share: of the requests for which a latency is predicted, 0.95 for the 95th percentile.
    """

    speed: PrefillSpeed
    variation: float
    share: float

    def service_ms(self, load: OfferedLoad) -> float:
        """Mean time of a prompt. Long prompts weigh more than their number: attention is quadratic."""
        missing, cached = load.num_missing_tokens, load.num_prompt_tokens - load.num_missing_tokens
        pairs = missing * (cached + missing * (1 + self.variation**2) / 2)
        return self.speed.ms_per_request + self.speed.ms_per_token * missing + self.speed.ms_per_pair * pairs

    def offered(self, load: OfferedLoad) -> float:
        """Workers kept busy."""
        return load.requests_per_s * self.service_ms(load) / 1000

    def wait_ms(self, num_workers: int, offered: float, service_ms: float, backlog_ms: float = 0.0) -> float:
        """Longest wait of all but 1 - `share` of the prompts, behind `backlog_ms` of the pool's work."""
        queue_ms = wait_quantile(num_workers, offered, service_ms, self.variation, self.share)
        return queue_ms + backlog_ms / num_workers

    def own_ms(self, service_ms: float) -> float:
        """The prompt's own time at the percentile; no number of workers shortens it."""
        return service_ms * (1 + self.variation * (-math.log(1 - self.share) - 1))

    def ttft_ms(self, num_workers: int, offered: float, service_ms: float, backlog_ms: float = 0.0) -> float:
        """Wait and own time. Their percentiles rarely meet in one request: beyond the means they add as squares."""
        wait_ms = self.wait_ms(num_workers, offered, service_ms)
        if math.isinf(wait_ms):
            return math.inf
        beyond_ms = math.hypot(wait_ms, self.own_ms(service_ms) - service_ms)
        return service_ms + beyond_ms + backlog_ms / num_workers


@dataclass(frozen=True, slots=True)
class Batch:
    """Decode workers at a load. `kv_use`: share of their KV that is taken at the percentile; more than 1 is too much.

    `tpot_ms` is of a step at the percentile, `num_running` the mean number of requests at each worker.
    """

    num_running: float
    tpot_ms: float
    kv_use: float
    slot_use: float

    @property
    def use(self) -> float:
        return max(self.kv_use, self.slot_use)


_OVERLOADED = Batch(math.inf, math.inf, math.inf, math.inf)


@dataclass(frozen=True, slots=True)
class DecodeCapacity:
    """Decode workers of one kind.

    Args:
        speed: of one worker.
        kv_tokens: of one worker's KV; 0 = not known, taken for enough.
        max_running: requests that one worker runs at once.
        variation: of a request's context: standard deviation over mean.
        share: of the time for which a step's time is predicted.
    """

    speed: DecodeSpeed
    kv_tokens: int
    max_running: int
    variation: float
    share: float

    def batch(self, num_workers: int, load: OfferedLoad, prefill_s: float = 0.0) -> Batch:
        """The steady state of Little's law: requests running = arrivals x answer's length x step's time.

        A request's steps are as long as those that it finds make them, and itself.
        `prefill_s`: how long a request has its KV promised here while its prompt is computed elsewhere.
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

    def _crowd(self, num_running: float, num_workers: int) -> float:
        """Requests at one worker when there are many: arrivals are random, and the router levels the workers."""
        spread = NormalDist().inv_cdf(self.share) * math.sqrt(num_running * (1 + self.variation**2))
        return (num_running + spread) / num_workers
