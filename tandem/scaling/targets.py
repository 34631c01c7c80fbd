"""Interface of scaled pools: replicas are read and written, and one planner leads.

Protocols and values; `kubernetes` has the implementations that act, here are those that act on nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class Pool(StrEnum):
    """Workers that are scaled together."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One that exists and was not told to end. Times are seconds since 1970; `ready_s`: None while it is not ready."""

    name: str
    created_s: float
    ready_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolReplicas:
    """`num_wanted` is what was asked for last, by whomever. `replicas`: None = which exist is not known."""

    num_wanted: int
    replicas: Sequence[Replica] | None = None


class ScaleTargets(Protocol):
    """Pools in which replicas are counted and asked for.

    Both raise a `TandemError` that names what was refused or is away, and what to do; calling again later can help.
    """

    async def read(self, pool: Pool) -> PoolReplicas | None:
        """Number asked for, and the replicas that exist. None: unknown here."""
        ...

    async def write(self, pool: Pool, num_replicas: int, seen: PoolReplicas) -> None:
        """Ask for so many, unless somebody else asked for another number since `seen`."""
        ...


class Leadership(Protocol):
    """Election of the planner that acts."""

    @property
    def is_leader(self) -> bool:
        """Whether this one may act at this very moment."""
        ...

    async def run(self) -> None:
        """Stand for it until cancelled, then give it up."""
        ...


class NoTargets:
    """`ScaleTargets` where there is nothing to scale: what is ready is all that is known."""

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
        """Nobody is asked."""
