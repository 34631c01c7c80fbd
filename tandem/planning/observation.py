"""Observations that a planner is given and plans that it returns. Values only.

Lengths are tokens, times seconds, latencies milliseconds. A replica is one worker.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tandem.routing.speed import Speed


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Arrivals at all gateways during the `duration_s` before the observation, rejected requests included.

    `num_cached_tokens` of the `num_prompt_tokens` needed no prefill. `num_output_tokens` belongs to those that ended.
    `variation` is of one request's tokens to compute: standard deviation over mean, where that is known.
    """

    duration_s: float
    num_requests: int
    num_rejected: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_finished: int = 0
    num_output_tokens: int = 0
    variation: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolState:
    """One pool as it is.

    Args:
        num_wanted: replicas that were asked for last.
        num_ready: those that take work; starting and draining ones are not among them.
        starting_s: for each replica that starts, for how long it has.
        speed: of one worker, measured or from its roofline; None = nothing is known yet.
        kv_tokens: of one worker's KV pool.
        max_running: requests that one worker runs at once.
        num_waiting, num_running, num_context_tokens: in the whole pool now.
        queued_ms: prompt work that waits in the whole pool.
        startup_s: how long a replica takes from being wanted to being ready, as far as known.
    """

    num_wanted: int
    num_ready: int
    starting_s: Sequence[float] = ()
    speed: Speed | None = None
    kv_tokens: int = 0
    max_running: int = 256
    num_waiting: int = 0
    num_running: int = 0
    num_context_tokens: int = 0
    queued_ms: float = 0.0
    startup_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Everything at one moment. Measured latencies are of the traffic's window; None = nothing ended in it."""

    now_s: float
    traffic: Traffic
    prefill: PoolState
    decode: PoolState
    ttft_ms: float | None = None
    tpot_ms: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """Predicted latencies for users (infinite when work arrives faster than it is done)."""

    ttft_ms: float
    tpot_ms: float
    prefill_use: float
    decode_use: float
    meets_slo: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Replicas wanted from now on; `reason` says in words why, `now` and `then` what it changes."""

    num_prefill: int
    num_decode: int
    reason: str
    now: Outlook | None = None
    then: Outlook | None = None
    warnings: Sequence[str] = field(default=())


class ScalingPolicy(Protocol):
    """Observations in, replicas out. Deterministic; it may remember what it was told before."""

    def plan(self, observation: Observation) -> Plan: ...
