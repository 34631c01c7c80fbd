"""Inputs and results of sizing: objectives and limits, pools and predicted latencies. Values only."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.core.errors import ConfigurationError
from tandem.planning.hardware import NetworkLink
from tandem.planning.profile import Profile
from tandem.planning.roofline import HandOffEstimate, Roofline


@dataclass(frozen=True, slots=True, kw_only=True)
class Goals:
    """Objectives, and limits of a pool's use.

    Args:
        ttft_ms, tpot_ms: latencies that `share` of the requests must meet.
        max_use: maximum share of a prefill worker's time, and of a decode worker's KV, in use in the steady state.
        max_link_use: maximum share of a link's usable rate in use.
        max_running: maximum number of requests that a decode worker runs at once.
        chunk_tokens: prompt tokens of one prefill step, after which their KV is sent.
    """

    ttft_ms: float
    tpot_ms: float
    share: float = 0.95
    max_use: float = 0.85
    max_link_use: float = 0.7
    max_running: int = 256
    chunk_tokens: int = 2048

    def __post_init__(self) -> None:
        for name in ("ttft_ms", "tpot_ms"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigurationError(f"{name}={getattr(self, name):g}; an objective is a time above zero")
        for name in ("share", "max_use", "max_link_use"):
            if not 0 < getattr(self, name) < 1:
                raise ConfigurationError(f"{name}={getattr(self, name):g}; use a share above 0 and below 1")
        if self.max_running < 1 or self.chunk_tokens < 1:
            raise ConfigurationError(
                f"max_running={self.max_running}, chunk_tokens={self.chunk_tokens}; both must be 1 or more"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentSite:
    """Deployment to size: prefill and decode workers, the link between them, the workload and the objectives."""

    prefill: Roofline
    decode: Roofline
    link: NetworkLink
    profile: Profile
    goals: Goals

    def hand_off(self, num_prompt_tokens: float) -> HandOffEstimate:
        """Hand-off of a prompt of this length."""
        cached = self.profile.cached(num_prompt_tokens)
        return self.prefill.hand_off(num_prompt_tokens, cached, self.link, self.goals.chunk_tokens)

    def link_bytes_per_s(self, rate_per_s: float) -> float:
        """Bytes of KV per second that all prefill workers send, a head's included, assuming that decode workers hold
        none of it.
        """
        prompts = [prompt for prompt, _ in self.profile.lengths]
        return rate_per_s * math.fsum(map(self.prefill.held_bytes, prompts)) / len(prompts)


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedPool:
    """Number of workers of one kind, with the need that determines it.

    Args:
        limit: name of that need.
        time_use: share of time spent on prompts; None: does not apply to this pool.
        kv_use: share of KV in use at the percentile; None: does not apply to this pool.
        link_use: share of the link's usable rate.
    """

    num_workers: int
    num_accelerators: int
    limit: str
    time_use: float | None
    kv_use: float | None
    link_use: float
    usd_per_hour: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedLatency:
    """Latency of all requests in milliseconds: the mean, and the percentile of the objective (`high_ms`)."""

    mean_ms: float
    high_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """Pools for one request rate: prefill and decode, or one aggregated pool (`decode` is None).

    Args:
        num_running: mean number of requests decoding at once on each worker.
        longest_gap_ms: longest usual time between two tokens of a decoding request.
        problems: objectives that no number of workers meets, with reasons; empty = all are met.
    """

    rate_per_s: float
    prefill: SizedPool
    decode: SizedPool | None
    ttft: PredictedLatency
    tpot: PredictedLatency
    num_running: float
    longest_gap_ms: float
    problems: Sequence[str]

    @property
    def pools(self) -> Sequence[SizedPool]:
        return (self.prefill,) if self.decode is None else (self.prefill, self.decode)

    @property
    def num_accelerators(self) -> int:
        return sum(pool.num_accelerators for pool in self.pools)

    @property
    def usd_per_hour(self) -> float:
        return math.fsum(pool.usd_per_hour for pool in self.pools)

    def usd_per_million(self, num_tokens_of_request: float) -> float:
        """Cost of a million tokens, given the tokens of one request."""
        return self.usd_per_hour / (3600 * self.rate_per_s * num_tokens_of_request) * 1e6
