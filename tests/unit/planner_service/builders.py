"""Sights, plans and replicas for tests of what is made of them."""

import asyncio
from collections.abc import Mapping
from typing import Any

from tandem.core.errors import TandemError
from tandem.planner_service.actuator import Bounds, PoolBounds
from tandem.planner_service.observer import ClusterObservation
from tandem.planner_service.targets import Pool, PoolReplicas
from tandem.planning.observation import Observation, Plan, PoolState, Traffic

P, D = Pool.PREFILL, Pool.DECODE


def observation(num_prefill: int = 1, num_decode: int = 1, **changes: Any) -> Observation:
    fields: dict[str, Any] = {
        "now_s": 0.0,
        "traffic": Traffic(duration_s=10.0, num_requests=20),
        "prefill": PoolState(num_wanted=num_prefill, num_ready=num_prefill),
        "decode": PoolState(num_wanted=num_decode, num_ready=num_decode),
    }
    return Observation(**{**fields, **changes})


def plan(num_prefill: int, num_decode: int, **changes: Any) -> Plan:
    return Plan(**{"num_prefill": num_prefill, "num_decode": num_decode, "reason": "because", **changes})


def bounds(least: int = 1, most: int = 9, **changes: Any) -> Bounds:
    pool = PoolBounds(least=least, most=most)
    return Bounds(**{"pools": {P: pool, D: pool}, "max_step_up": 16, "max_step_down": 16, **changes})


class Deployments:
    """`ScaleTargets` in memory. `failure`: raised instead; `is_stalled`: never answers."""

    def __init__(self, num_prefill: int = 1, num_decode: int = 1) -> None:
        self.wanted = {P: num_prefill, D: num_decode}
        self.written: list[tuple[Pool, int]] = []
        self.failure: TandemError | None = None
        self.is_stalled = False

    async def read(self, pool: Pool) -> PoolReplicas:
        await self._answer()
        return PoolReplicas(num_wanted=self.wanted[pool])

    async def write(self, pool: Pool, num_replicas: int, seen: PoolReplicas) -> None:
        await self._answer()
        assert seen.num_wanted == self.wanted[pool]
        self.wanted[pool] = num_replicas
        self.written.append((pool, num_replicas))

    def observed(self, *problems: str, unknown: Pool | None = None) -> ClusterObservation:
        """Observation that an observer would make of them."""
        replicas: Mapping[Pool, PoolReplicas] = {
            pool: PoolReplicas(num_wanted=num_wanted) for pool, num_wanted in self.wanted.items() if pool != unknown
        }
        seen = observation(self.wanted[P], self.wanted[D])
        return ClusterObservation(at_s=0.0, observation=seen, replicas=replicas, problems=problems)

    async def _answer(self) -> None:
        if self.is_stalled:
            await asyncio.Event().wait()
        if self.failure is not None:
            raise self.failure


class Throne:
    """`Leadership` that is given and taken."""

    def __init__(self, is_leader: bool = True) -> None:
        self.is_leader = is_leader

    async def run(self) -> None:
        await asyncio.Event().wait()
