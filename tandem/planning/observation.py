"""Interface of scaling policies: observations (input), plans (output) and the protocol `ScalingPolicy`.

Lengths are in tokens, times in seconds, latencies in milliseconds. A replica is one worker.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tandem.routing.speed import Speed


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Arrivals at all gateways during the `duration_s` before the observation, rejected requests included.

    Args:
        num_cached_tokens: the part of `num_prompt_tokens` that needed no prefill.
        num_output_tokens: of requests that finished.
        variation: coefficient of variation of a request's tokens to compute; None if unknown.
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
    """State of one pool.

    Args:
        num_wanted: replicas requested last.
        num_ready: replicas that accept work, without starting and draining ones.
        starting_s: seconds since the start of each starting replica.
        speed: speed of one worker, measured or from its roofline; None = unknown.
        kv_tokens: capacity of one worker's KV pool.
        max_running: maximum number of requests that one worker runs at once.
        num_waiting, num_running, num_context_tokens: current totals of the pool.
        queued_ms: prompt work that waits, total of the pool.
        startup_s: time from requesting a replica until it is ready; None = unknown.
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
    """Input of a scaling policy at one moment. Latencies were measured in the traffic's window; None = no sample."""

    now_s: float
    traffic: Traffic
    prefill: PoolState
    decode: PoolState
    ttft_ms: float | None = None
    tpot_ms: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """Predicted latencies of requests (infinite if work arrives faster than it is done) and use of the pools."""

    ttft_ms: float
    tpot_ms: float
    prefill_use: float
    decode_use: float
    meets_slo: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Replicas wanted from now on. `reason`: explanation; `now`, `then`: predictions before and after the change."""

    num_prefill: int
    num_decode: int
    reason: str
    now: Outlook | None = None
    then: Outlook | None = None
    warnings: Sequence[str] = field(default=())


class ScalingPolicy(Protocol):
    """Decides the number of replicas from observations. Deterministic; may keep state from earlier observations."""

    def plan(self, observation: Observation) -> Plan: ...
