"""Messages between the leader of a group and its other ranks, over a socket pair that only these two processes have.

They are pickles: both ends are one release, and nobody else can write to either.
"""

from dataclasses import dataclass

from tandem.core.config import EngineConfig
from tandem.engine.ranks import ShardSizes
from tandem.scheduler.output import SchedulerOutput


@dataclass(frozen=True, slots=True)
class Begin:
    """Leader: load a part of this model. `config`: a rank's share. `deadline_s`: of each exchange."""

    epoch: str
    rank: int
    num_ranks: int
    num_stages: int
    config: EngineConfig
    deadline_s: float
    log_level: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """Rank: the part is in memory."""

    epoch: str
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Refused:
    """Rank: it cannot serve, and ends."""

    epoch: str
    reason: str


@dataclass(frozen=True, slots=True)
class Prepare:
    """Leader: take the memory. `keeps_pages`: there is KV in it, of an earlier epoch."""

    sizes: ShardSizes
    keeps_pages: bool


@dataclass(frozen=True, slots=True)
class Prepared:
    """Rank: steps can come."""

    epoch: str


@dataclass(frozen=True, slots=True)
class Step:
    """Leader: compute this. `number`: counts the steps of the group, from 1."""

    number: int
    work: SchedulerOutput


ToLeader = Loaded | Refused | Prepared
