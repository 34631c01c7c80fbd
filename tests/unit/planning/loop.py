"""Pools that do as they are told, as far as a planner can see them: fluid queues, replicas that take time to start."""

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from tandem.planning.observation import Observation, Plan, PoolState, ScalingPolicy, Traffic
from tandem.planning.planner_settings import PlannerConfig
from tandem.routing.speed import DecodeSpeed, PrefillSpeed, Speed

SPEED = Speed(PrefillSpeed(5.0, 0.025, 1e-6), DecodeSpeed(8.0, 0.012, 6e-5))
SETTINGS = PlannerConfig(ttft_ms=2000.0, tpot_ms=50.0)
NUM_PROMPT, NUM_CACHED, NUM_OUTPUT = 4000, 1000, 200


def traffic(rate_per_s: float, duration_s: float = 10.0) -> Traffic:
    num = round(rate_per_s * duration_s)
    return Traffic(
        duration_s=duration_s,
        num_requests=num,
        num_prompt_tokens=num * NUM_PROMPT,
        num_cached_tokens=num * NUM_CACHED,
        num_finished=num,
        num_output_tokens=num * NUM_OUTPUT,
    )


def pool(num: int, startup_s: float = 60.0, **changes: object) -> PoolState:
    base = PoolState(num_wanted=num, num_ready=num, speed=SPEED, kv_tokens=400_000, startup_s=startup_s)
    return replace(base, **changes)  # type: ignore[arg-type]


def observation(now_s: float, rate_per_s: float, prefill: PoolState, decode: PoolState) -> Observation:
    return Observation(now_s=now_s, traffic=traffic(rate_per_s), prefill=prefill, decode=decode)


@dataclass
class _Pool:
    wanted: int
    ready: int
    asked_s: list[float] = field(default_factory=list)

    def scale(self, num: int, now_s: float) -> None:
        while self.ready + len(self.asked_s) < num:
            self.asked_s.append(now_s)
        while self.ready + len(self.asked_s) > num and self.asked_s:
            self.asked_s.pop()
        self.ready = min(self.ready, num)
        self.wanted = num

    def settle(self, now_s: float, startup_s: float) -> None:
        self.ready += sum(now_s - asked_s >= startup_s for asked_s in self.asked_s)
        self.asked_s = [asked_s for asked_s in self.asked_s if now_s - asked_s < startup_s]


@dataclass
class Loop:
    """`rate(now_s)` gives each window's arrivals; `plans` keeps every answer, `queues_ms` the work that waited then."""

    policy: ScalingPolicy
    rate: Callable[[float], float]
    startup_s: float = 60.0
    sizes: tuple[int, int] = (2, 2)
    plans: list[Plan] = field(default_factory=list)
    queued_ms: float = 0.0
    queues_ms: list[float] = field(default_factory=list)

    def run(self, num_windows: int, interval_s: float = 10.0) -> list[tuple[int, int]]:
        """(Prefill, decode) wanted after each window."""
        prefill, decode = _Pool(self.sizes[0], self.sizes[0]), _Pool(self.sizes[1], self.sizes[1])
        for number in range(1, num_windows + 1):
            now_s = number * interval_s
            rate = self.rate(now_s)
            work_ms = rate * interval_s * SPEED.prefill.prompt_ms(NUM_PROMPT, NUM_CACHED)
            self.queued_ms = max(0.0, self.queued_ms + work_ms - 1000 * interval_s * prefill.ready)
            self.queues_ms.append(self.queued_ms)
            seen = Observation(
                now_s=now_s,
                traffic=traffic(rate, interval_s),
                prefill=self._state(prefill, now_s, queued_ms=self.queued_ms),
                decode=self._state(decode, now_s),
            )
            plan = self.policy.plan(seen)
            self.plans.append(plan)
            for side, num in ((prefill, plan.num_prefill), (decode, plan.num_decode)):
                side.scale(num, now_s)
                side.settle(now_s + interval_s, self.startup_s)
        return [(plan.num_prefill, plan.num_decode) for plan in self.plans]

    def _state(self, side: _Pool, now_s: float, queued_ms: float = 0.0) -> PoolState:
        return pool(
            side.wanted,
            self.startup_s,
            num_ready=side.ready,
            starting_s=[now_s - asked_s for asked_s in side.asked_s],
            queued_ms=queued_ms,
        )


def changes(sizes: list[tuple[int, int]]) -> int:
    """Number of changes of either pool's size."""
    return sum((a[0] != b[0]) + (a[1] != b[1]) for a, b in itertools.pairwise(sizes))


def noisy(rate_per_s: float, seed: int, interval_s: float = 10.0) -> Callable[[float], float]:
    """Poisson arrivals (their normal approximation) of a steady rate."""
    source = random.Random(seed)
    num = rate_per_s * interval_s
    return lambda now_s: max(0.0, source.gauss(num, num**0.5)) / interval_s
