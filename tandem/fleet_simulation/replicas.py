"""Replicas of one simulated pool and their states: starting, ready, draining, gone.

Invariant: a draining replica is removed only when its worker is idle, so no request or transfer is interrupted.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from tandem.fleet_simulation.events import EventQueue


class DrainableWorker(Protocol):
    """A worker as its pool sees it. `idle`: it may be removed."""

    @property
    def idle(self) -> bool: ...


W = TypeVar("W", bound=DrainableWorker)


@dataclass(slots=True, eq=False)
class SimulatedReplica(Generic[W]):
    """A replica of a pool; it uses accelerators from `requested_s` until `gone_s`."""

    replica_id: str
    worker: W
    requested_s: float
    ready: bool = False
    draining: bool = False
    gone_s: float | None = None


@dataclass(slots=True, eq=False)
class ReplicaPool(Generic[W]):
    """Replicas of one pool. `make`: creates a worker; `load`: load of a worker, the least loaded drain first;
    `changed`: called at each change of a replica's state.
    """

    name: str
    events: EventQueue
    startup_s: float
    make: Callable[[], W]
    load: Callable[[W], float]
    changed: Callable[[SimulatedReplica[W]], None]
    alive: dict[str, SimulatedReplica[W]] = field(default_factory=dict)
    past: list[SimulatedReplica[W]] = field(default_factory=list)

    def staying(self) -> Sequence[SimulatedReplica[W]]:
        """Replicas that are starting or ready, oldest first."""
        return [replica for replica in self.alive.values() if not replica.draining]

    def ready(self) -> Sequence[SimulatedReplica[W]]:
        """The replicas that accept work."""
        return [replica for replica in self.alive.values() if replica.ready and not replica.draining]

    def starting_s(self) -> Sequence[float]:
        """Seconds since the start of each starting replica."""
        return [self.events.now_s - replica.requested_s for replica in self.alive.values() if not replica.ready]

    def scale(self, num_wanted: int) -> None:
        """Start missing replicas, or remove surplus ones: first those still starting, then the least loaded."""
        staying = self.staying()
        for _ in range(num_wanted - len(staying)):
            self.start(self.startup_s)
        for replica in sorted(staying, key=self._reluctance)[: max(0, len(staying) - num_wanted)]:
            replica.draining = True
            self.changed(replica)
        self.sweep()

    def start(self, startup_s: float) -> None:
        """Add a replica, which is ready after `startup_s`."""
        replica = SimulatedReplica(f"{self.name}{len(self.alive) + len(self.past)}", self.make(), self.events.now_s)
        self.alive[replica.replica_id] = replica
        if startup_s > 0:
            self.events.at(self.events.now_s + startup_s, lambda: self._became_ready(replica))
        else:
            self._became_ready(replica)

    def sweep(self) -> None:
        """Remove draining replicas whose workers are idle."""
        for replica in [r for r in self.alive.values() if r.draining and r.worker.idle]:
            replica.gone_s = self.events.now_s
            self.past.append(self.alive.pop(replica.replica_id))
            self.changed(replica)

    def replica_s(self) -> float:
        """Replica-seconds up to now, starting and draining ones included."""
        now_s = self.events.now_s
        everyone = (*self.past, *self.alive.values())
        return sum((now_s if r.gone_s is None else r.gone_s) - r.requested_s for r in everyone)

    def _became_ready(self, replica: SimulatedReplica[W]) -> None:
        if replica.gone_s is None and not replica.draining:
            replica.ready = True
            self.changed(replica)

    def _reluctance(self, replica: SimulatedReplica[W]) -> tuple[bool, float, float]:
        return replica.ready, self.load(replica.worker), -replica.requested_s
