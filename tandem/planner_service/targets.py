"""Interfaces of scaled pools and of leader election.

Protocols and values, with implementations that change nothing; `kubernetes` has those that do.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class Pool(StrEnum):
    """A set of workers that is scaled together."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """A replica that exists and is not terminating. Times are seconds since 1970; `ready_s`: None while not ready."""

    name: str
    created_s: float
    ready_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolReplicas:
    """Replicas of one pool. `num_wanted`: number set last, by any writer. `replicas`: existing ones; None = unknown."""

    num_wanted: int
    replicas: Sequence[Replica] | None = None


class ScaleTargets(Protocol):
    """Pools whose replicas can be read and set.

    Both methods raise a `TandemError` that names what was refused or is unavailable and the remedy; retrying can help.
    """

    async def read(self, pool: Pool) -> PoolReplicas | None:
        """Returns the number set and the replicas that exist; None if unknown."""
        ...

    async def write(self, pool: Pool, num_replicas: int, seen: PoolReplicas) -> None:
        """Sets the number of replicas. Raises if it was changed since `seen`."""
        ...


class Leadership(Protocol):
    """Election of the planner that acts."""

    @property
    def is_leader(self) -> bool:
        """Whether this planner may act at this moment."""
        ...

    async def run(self) -> None:
        """Take part in the election until cancelled, then give up leadership."""
        ...


class NoTargets:
    """`ScaleTargets` with nothing to scale: the number of replicas set is unknown."""

    async def read(self, pool: Pool) -> PoolReplicas | None:
        return None

    async def write(self, pool: Pool, num_replicas: int, seen: PoolReplicas) -> None:
        raise AssertionError("nothing is written without targets")


class Adviser:
    """`Leadership` of a planner that only advises: it never leads."""

    @property
    def is_leader(self) -> bool:
        return False

    async def run(self) -> None:
        """Wait until cancelled; there is no election."""
