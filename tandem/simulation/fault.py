"""Faults of a scenario, as plain values: kinds, times, and the processes concerned."""

import random
from dataclasses import dataclass
from enum import StrEnum


class FaultKind(StrEnum):
    """Kinds of faults, and the meaning of `Fault.other` and `Fault.size` for each.

    PAUSE: the process stands still. CRASH: it dies and is started again; size 1 = its host died too, so nobody is told.
    SLOW: its work takes `size` times as long. CUT, CUT_ONE_WAY: nothing gets through to `other`. HALF_OPEN: its
    connections to `other` are reset, which `other` is not told. CLOCK: its wall clock
    is set by `size` seconds. LOSSY: messages of everybody are lost and sent again. SLOW_READS: reads of
    blocks take `size` seconds a piece. CUT_CALLS: as CUT, but blocks can be read. STORE_DOWN, STORE_FAILOVER (the last
    `size` seconds of writes are lost), STORE_CLOCK: of the shared store. KUBERNETES_DOWN: its API answers nothing.
    DISK_FULL: of the store, which then takes no writes, or of a gateway with its journal of settlements.
    Those of a worker's ranks name the rank in `other`, or both that are parted. RANK_SLOW: as SLOW. RANKS_REFUSED: one
    is killed, and the group cannot be formed anew.
    """

    PAUSE = "pause"
    CRASH = "crash"
    SLOW = "slow"
    CUT = "cut"
    CUT_ONE_WAY = "cut one way"
    CLOCK = "clock"
    LOSSY = "lossy"
    SLOW_READS = "slow reads"
    CUT_CALLS = "cut calls"
    STORE_DOWN = "store down"
    STORE_FAILOVER = "store failover"
    STORE_CLOCK = "store clock"
    KUBERNETES_DOWN = "kubernetes down"
    DISK_FULL = "disk full"
    HALF_OPEN = "half open"
    RANK_KILLED = "rank killed"
    RANK_PAUSED = "rank paused"
    RANK_SLOW = "rank slow"
    RANKS_CUT = "ranks cut"
    RANKS_REFUSED = "ranks refused"


# how often each fault of ranks is drawn, relative to the others
RANK_WEIGHTS = {
    FaultKind.RANK_KILLED: 5,
    FaultKind.RANK_PAUSED: 4,
    FaultKind.RANK_SLOW: 2,
    FaultKind.RANKS_CUT: 2,
    FaultKind.RANKS_REFUSED: 1,
}
RANK_FAULTS = frozenset(RANK_WEIGHTS)
NOTICED_RANK_FAULTS = frozenset({FaultKind.RANK_KILLED, FaultKind.RANK_PAUSED, FaultKind.RANKS_REFUSED})  # within 2 s


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of the process `name`, which begins at `at_s` and lasts `for_s` seconds. See `FaultKind` for the
    rest.
    """

    kind: FaultKind
    at_s: float
    for_s: float
    name: str
    other: str = ""
    size: float = 0.0

    def __str__(self) -> str:
        return f"{self.at_s:6.2f} s {self.kind} {self.name} {self.other} size {self.size:g} for {self.for_s:.2f} s"


def rank_fault_at(draw: random.Random, at_s: float, name: str, num_ranks: int) -> Fault:
    """Draws a fault of one rank of a worker, or between two. Faults of the leader alone are those of the worker."""
    (kind,) = draw.choices(list(RANK_WEIGHTS), list(RANK_WEIGHTS.values()))
    numbers = sorted(draw.sample(range(num_ranks), 2), reverse=True)
    other, for_s, size = str(numbers[0]), 0.0, 0.0
    match kind:
        case FaultKind.RANK_PAUSED:
            for_s = draw.choice((draw.uniform(0.05, 1.4), draw.uniform(1.5, 6.0)))
        case FaultKind.RANK_SLOW:
            for_s, size = draw.uniform(0.5, 8.0), draw.choice((4.0, 40.0, 1000.0))
        case FaultKind.RANKS_CUT:
            other, for_s = " ".join(map(str, numbers)), draw.uniform(0.2, 8.0)
        case FaultKind.RANKS_REFUSED:
            for_s = draw.uniform(0.5, 5.0)
    return Fault(kind, at_s, for_s, name, other, size)


@dataclass(slots=True)
class FaultInterval:
    """Time interval of a fault; `until_s` is None while it lasts."""

    name: str
    other: str
    from_s: float
    until_s: float | None = None
    kind: FaultKind | None = None
