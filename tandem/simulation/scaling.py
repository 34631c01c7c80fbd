"""Planners in a scenario: draws their settings and faults, and checks invariants of what they do.

Each change of a scale is made by the elected planner, within the bounds and the budget; no pool shrinks while a gateway
cannot be seen.
"""

import random
from dataclasses import dataclass, field
from typing import Protocol

from tandem.simulation.kubernetes import KUBERNETES, ScaleWrite, SimulatedKubernetes

LEASE = "tandem-planner"  # name of the Kubernetes Lease whose holder leads the planners
LEASE_S = 3.0  # after which it expires if not renewed
INTERVAL_S = 0.5  # between two observations of a planner
MAX_STEP = 2  # largest change of a scale at once
REST_S = 6.0  # twice a lease: by then another planner leads if the leader has died
SEEN_AGAIN_S = 5.0  # of a gateway that is away: an observation that was begun before may still be acted on


@dataclass(frozen=True, slots=True)
class Scaling:
    """Settings of the planners. `budget`: accelerators of both pools together. `startup_s`: of a new worker."""

    max_prefill: int
    max_decode: int
    budget: int
    hold_s: float
    ttft_ms: float
    tpot_ms: float
    startup_s: float

    @classmethod
    def drawn(cls, draw: random.Random) -> "Scaling":
        """Random settings."""
        max_prefill, max_decode = draw.choice((2, 3)), draw.choice((3, 4))
        return cls(
            max_prefill=max_prefill,
            max_decode=max_decode,
            budget=draw.choice((4, 5, max_prefill + max_decode)),
            hold_s=draw.choice((1.0, 4.0)),
            ttft_ms=draw.choice((50.0, 400.0)),
            tpot_ms=draw.choice((10.0, 60.0)),
            startup_s=draw.choice((0.3, 2.0)),
        )

    def most(self, deployment: str) -> int:
        """Largest allowed number of replicas of a Deployment."""
        return self.max_prefill if deployment == "prefill" else self.max_decode


class SeesProcesses(Protocol):
    """The part of `World` that these invariants use."""

    def violate(self, what: str) -> None: ...

    def away_since_s(self, name: str) -> float | None:
        """Time since which a process has been paused or dead; None: it runs."""
        ...

    def leaders(self) -> list[str]:
        """Planners that run and believe that they lead."""
        ...

    def was_well_since(self, name: str, since_s: float) -> bool:
        """Whether no fault has concerned it since then."""
        ...

    def observed_at_s(self, planner: str) -> float:
        """Time of the planner's last observation, in the loop's time."""
        ...


@dataclass(slots=True)
class ScalingInvariants:
    """Checks each call of the Kubernetes API and each change of a scale."""

    world: SeesProcesses
    kubernetes: SimulatedKubernetes
    scaling: Scaling
    gateways: tuple[str, ...]
    planners: tuple[str, ...]
    writes: list[ScaleWrite] = field(default_factory=list)

    def note(self, write: ScaleWrite) -> None:
        """Record and check a change of a scale."""
        self.writes.append(write)
        told = f"{write.writer} set {write.deployment} from {write.before} to {write.after}"
        self._check_leader(write, told)
        if not 1 <= write.after <= self.scaling.most(write.deployment):
            self.world.violate(f"{told}, beyond its bounds")
        if abs(write.after - write.before) > MAX_STEP:
            self.world.violate(f"{told} in one step")
        if write.after > write.before and sum(self.kubernetes.replicas.values()) > self.scaling.budget:
            self.world.violate(f"{told}, beyond the budget of {self.scaling.budget}")
        if write.after < write.before:
            for gateway in self.gateways:
                since_s = self.world.away_since_s(gateway)
                if since_s is not None and write.at_s - since_s > SEEN_AGAIN_S:
                    self.world.violate(f"{told} without {gateway}, away since {since_s:.1f} s")

    def check_leaders(self) -> None:
        """Checks that at most one planner leads. Called at each call of the API."""
        if len(leaders := self.world.leaders()) > 1:
            self.world.violate(f"{' and '.join(leaders)} lead at once")

    def check_rest(self) -> None:
        """Checks, after a time without faults, that one planner leads and all observe."""
        now_s = self.kubernetes.node.now_s()
        since_s = now_s - REST_S
        planners = [name for name in self.planners if self.world.was_well_since(name, since_s)]
        if len(planners) < len(self.planners) or not self.world.was_well_since(KUBERNETES, since_s):
            return
        if len(leaders := self.world.leaders()) != 1:
            self.world.violate(f"{' and '.join(leaders) or 'nobody'} leads at last")
        for name in planners:
            if now_s - self.world.observed_at_s(name) > REST_S:
                self.world.violate(f"{name} has looked at {self.world.observed_at_s(name):.1f} s for the last time")

    def _check_leader(self, write: ScaleWrite, told: str) -> None:
        """Checks that the writer holds the lease. NOTE: a planner that was paused may write once after it lost the
        lease; object versions bound the harm.
        """
        holder = self.kubernetes.holder(LEASE).partition("_")[0]
        if holder != write.writer and self.world.was_well_since(write.writer, write.at_s - LEASE_S):
            self.world.violate(f"{told}, and {holder or 'nobody'} holds the lease")


def planner_faults_at(draw: random.Random, begin_s: float, span_s: float) -> list[tuple[str, float, float, str, str]]:
    """Draws faults of planners and of what they need: (kind, time, duration, name, other end) each."""
    faults = []
    for _ in range(draw.randint(0, 4)):
        kind = draw.choice(("pause", "crash", "cut", "cut one way", "kubernetes down"))
        name, other = draw.choice(("planner-0", "planner-1")), ""
        if kind.startswith("cut"):
            other = draw.choice((KUBERNETES, KUBERNETES, "router-0", "gateway-0", "decode-0"))
        elif kind == "kubernetes down":
            name = KUBERNETES
        faults.append((kind, begin_s + draw.uniform(0, span_s), 0.5 + draw.expovariate(1 / 3.0), name, other))
    return faults
