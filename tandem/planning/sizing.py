"""Inputs and result of a plan: objectives and limits in, pools and predicted latencies out. Values only."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.core.errors import ConfigurationError
from tandem.planning.hardware import NetworkLink
from tandem.planning.profile import Profile
from tandem.planning.roofline import HandOffEstimate, Roofline


@dataclass(frozen=True, slots=True, kw_only=True)
class Goals:
    """Objectives, and the limits that a pool is kept under.

    Args:
        ttft_ms, tpot_ms: that `share` of the requests shall meet.
        max_use: share of a prefill worker's time, and of a decode worker's KV, that may be taken in the steady state.
        max_link_use: share of a link's usable rate, likewise.
        max_running: requests that a decode worker runs at once.
        chunk_tokens: prompt tokens of one step, after which KV is handed on.
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
    """Two kinds of workers, what lies between them, and what is asked of them."""

    prefill: Roofline
    decode: Roofline
    link: NetworkLink
    profile: Profile
    goals: Goals

    def hand_off(self, num_prompt_tokens: float) -> HandOffEstimate:
        """Of one such prompt."""
        cached = self.profile.cached(num_prompt_tokens)
        return self.prefill.hand_off(num_prompt_tokens, cached, self.link, self.goals.chunk_tokens)

    def link_bytes_per_s(self, rate_per_s: float) -> float:
        """KV that all prefill workers together send, as if no decode worker held any of it."""
        prompts = [prompt for prompt, _ in self.profile.lengths]
        return rate_per_s * math.fsum(map(self.prefill.model.kv_bytes, prompts)) / len(prompts)


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedPool:
    """Workers of one kind, and why so many. Uses are shares: of the time by prompts, of KV when there are many
    requests, of the link's usable rate. None: not what this pool is short of.
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
    """Of all requests: the mean, and what the objective's share of them stays within. Milliseconds."""

    mean_ms: float
    high_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """Pools for one rate: prefill and decode, or one that does both (`decode` is None).

    Args:
        num_running: requests that decode at once in each worker, in the mean.
        longest_gap_ms: the longest time between two tokens of a request that is usual, once it decodes.
        problems: which objective cannot be met at any count, and why; empty = all are met.
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
        """Cost of a million tokens, of which each request has so many."""
        return self.usd_per_hour / (3600 * self.rate_per_s * num_tokens_of_request) * 1e6
