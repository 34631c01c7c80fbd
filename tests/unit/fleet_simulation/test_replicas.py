"""A pool's replicas: what starts, what drains, and when accelerators are given back."""

from dataclasses import dataclass

from tandem.fleet_simulation.events import EventQueue
from tandem.fleet_simulation.replicas import ReplicaPool, SimulatedReplica


@dataclass
class Worker:
    load: int = 0

    @property
    def idle(self) -> bool:
        return self.load == 0


def _pool(startup_s: float = 60.0) -> tuple[ReplicaPool[Worker], list[tuple[str, str]]]:
    seen = list[tuple[str, str]]()

    def changed(replica: SimulatedReplica[Worker]) -> None:
        state = "gone" if replica.gone_s is not None else "draining" if replica.draining else "ready"
        seen.append((replica.replica_id, state))

    return ReplicaPool("p", EventQueue(), startup_s, Worker, lambda worker: worker.load, changed), seen


def test_a_replica_is_ready_after_its_start_up_and_paid_from_the_asking() -> None:
    pool, seen = _pool()
    pool.scale(2)
    assert (len(pool.ready()), list(pool.starting_s())) == (0, [0.0, 0.0])
    pool.events.run()
    assert (len(pool.ready()), pool.replica_s()) == (2, 120.0)
    assert seen == [("p0", "ready"), ("p1", "ready")]


def test_those_that_start_are_given_up_first() -> None:
    pool, _ = _pool()
    pool.start(0.0)
    pool.scale(3)
    pool.events.at(10.0, lambda: pool.scale(1))
    pool.events.run()
    assert [replica.replica_id for replica in pool.ready()] == ["p0"]
    assert pool.replica_s() == 60.0 + 2 * 10.0


def test_the_least_loaded_drains_and_goes_when_idle() -> None:
    pool, seen = _pool(0.0)
    pool.scale(3)
    for replica, load in zip(pool.ready(), (5, 2, 7), strict=True):
        replica.worker.load = load
    pool.scale(2)
    assert [replica.replica_id for replica in pool.ready()] == ["p0", "p2"]
    pool.sweep()
    assert len(pool.alive) == 3
    pool.alive["p1"].worker.load = 0
    pool.sweep()
    assert seen[-2:] == [("p1", "draining"), ("p1", "gone")]
    assert len(pool.alive) == 2


def test_ids_are_never_used_twice() -> None:
    pool, _ = _pool(0.0)
    pool.scale(2)
    pool.scale(1)
    pool.scale(2)
    assert len({*pool.alive, *(replica.replica_id for replica in pool.past)}) == 3
