"""Factors that correct the predicted speed of workers, learned from the windows that a planner observes.

Prefill has a factor of throughput (below 1: slower than predicted), learned only while prompts wait for the whole pool,
since idle time would look like slowness. Decode has a factor of step time (above 1: slower): measured TPOT over the
time predicted for the present batch, which needs no queue. Neither is learned while a replica is new: its first steps
compile, load and fill caches.
"""

from dataclasses import dataclass

from tandem.planning.observation import Observation
from tandem.routing.speed import DecodeSpeed, PrefillSpeed, PrefillWork

_WEIGHT = 0.3  # of a new measurement in a factor
_LEAST, _MOST = 0.25, 2.0  # bounds of a measurement
_NOISE = 0.2  # a decode factor that differs from 1 by no more is not applied


@dataclass(frozen=True, slots=True)
class _Seen:
    """State at the end of the last window."""

    num_prefill: int
    num_decode: int
    queued_ms: float


class SpeedCorrection:
    """Correction factors of both pools. `prefill`: measured over predicted throughput; `corrected` applies decode's."""

    def __init__(self, warmup_s: float) -> None:
        self._warmup_s = warmup_s
        self._warm_from_s = float("-inf")
        self._last: _Seen | None = None
        self.prefill = 1.0
        self._step = 1.0

    def observe(self, observation: Observation, prefill: PrefillSpeed, decode: DecodeSpeed) -> None:
        """Learn from a window's measurements if they are representative. `prefill`, `decode`: predicted speeds."""
        seen = _Seen(observation.prefill.num_ready, observation.decode.num_ready, observation.prefill.queued_ms)
        last, self._last = self._last, seen
        if last is None or seen.num_prefill > last.num_prefill or seen.num_decode > last.num_decode:
            self._warm_from_s = observation.now_s + self._warmup_s
        elif observation.now_s >= self._warm_from_s and seen.num_prefill == last.num_prefill:
            self._learn_prefill(observation, last, prefill)
            self._learn_decode(observation, decode)

    def corrected(self, speed: DecodeSpeed) -> DecodeSpeed:
        """Returns the predicted decode speed with its times multiplied by the factor; small differences are noise."""
        if abs(self._step - 1) <= _NOISE:
            return speed
        return DecodeSpeed(
            speed.ms_per_step * self._step,
            speed.ms_per_request * self._step,
            speed.ms_per_context_token * self._step,
        )

    def _learn_prefill(self, observation: Observation, last: _Seen, speed: PrefillSpeed) -> None:
        """Work done = work arrived - growth of the queue; this is the pool's capacity only if no worker was idle."""
        traffic, pool = observation.traffic, observation.prefill
        capacity_ms = 1000 * traffic.duration_s * pool.num_ready
        if min(last.queued_ms, pool.queued_ms) < capacity_ms or traffic.num_rejected or traffic.num_requests == 0:
            return
        mean = PrefillWork.of(
            round(traffic.num_prompt_tokens / traffic.num_requests),
            round(traffic.num_cached_tokens / traffic.num_requests),
        )
        arrived_ms = traffic.num_requests * speed.ms(mean)
        done = (arrived_ms - pool.queued_ms + last.queued_ms) / capacity_ms
        self.prefill = _mixed(self.prefill, done)

    def _learn_decode(self, observation: Observation, speed: DecodeSpeed) -> None:
        pool = observation.decode
        if observation.tpot_ms is None or pool.num_ready == 0 or pool.num_running == 0:
            return
        step_ms = speed.step_ms(pool.num_running / pool.num_ready, pool.num_context_tokens / pool.num_ready)
        self._step = _mixed(self._step, observation.tpot_ms / step_ms) if step_ms > 0 else self._step


def _mixed(old: float, new: float) -> float:
    return (1 - _WEIGHT) * old + _WEIGHT * max(_LEAST, min(_MOST, new))
