"""Speed of a kind of worker: linear models of prefill and decode, in milliseconds.

Work adds up: the work of a queue is the sum of its requests' work, so one model prices both. Every coefficient is
zero or more, so more work is never cheaper. `calibration` learns the coefficients.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PrefillWork:
    """Prompt work still to compute. `num_pairs`: query-key pairs that attention visits, whole context included."""

    num_requests: float = 0.0
    num_tokens: float = 0.0
    num_pairs: float = 0.0

    def __add__(self, other: PrefillWork) -> PrefillWork:
        return PrefillWork(
            self.num_requests + other.num_requests,
            self.num_tokens + other.num_tokens,
            self.num_pairs + other.num_pairs,
        )

    @staticmethod
    def of(num_tokens: int, num_cached_tokens: int) -> PrefillWork:
        """Work of one prompt whose first `num_cached_tokens` tokens have their KV already."""
        missing = num_tokens - num_cached_tokens
        return PrefillWork(1.0, missing, missing * (num_cached_tokens + missing / 2))


NO_WORK = PrefillWork()


@dataclass(frozen=True, slots=True)
class PrefillSpeed:
    """Prefill model: overhead per request, matrix products per token, attention per query-key pair."""

    ms_per_request: float
    ms_per_token: float
    ms_per_pair: float

    def ms(self, work: PrefillWork) -> float:
        return (
            self.ms_per_request * work.num_requests
            + self.ms_per_token * work.num_tokens
            + self.ms_per_pair * work.num_pairs
        )

    def prompt_ms(self, num_tokens: int, num_cached_tokens: int) -> float:
        """`ms(PrefillWork.of(...))`, without building the work."""
        missing = num_tokens - num_cached_tokens
        pairs = missing * (num_cached_tokens + missing / 2)
        return self.ms_per_request + self.ms_per_token * missing + self.ms_per_pair * pairs


@dataclass(frozen=True, slots=True)
class DecodeSpeed:
    """Decode model: time per step (reading the weights), per request in it, and per context token (reading its KV)."""

    ms_per_step: float
    ms_per_request: float
    ms_per_context_token: float

    def step_ms(self, num_running: float, num_context_tokens: float) -> float:
        return self.ms_per_step + self.ms_per_request * num_running + self.ms_per_context_token * num_context_tokens


@dataclass(frozen=True, slots=True)
class Speed:
    """Prefill and decode models of one kind of worker."""

    prefill: PrefillSpeed
    decode: DecodeSpeed
