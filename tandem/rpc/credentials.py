"""Credentials of a process: the cluster secret, and the name and role that it proves to others.

The secret is only ever a key. Nothing that is sent lets a reader compute it or prove anything with it.
"""

import hmac
from dataclasses import dataclass, field
from enum import StrEnum

from tandem.core.machine import random_id


class ProcessRole(StrEnum):
    """What a process does in a cluster; decides what it may ask of others. OPERATOR: a tool that a person runs."""

    GATEWAY = "gateway"
    ROUTER = "router"
    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"
    PLANNER = "planner"
    OPERATOR = "operator"


WORKER_ROLES = frozenset({ProcessRole.PREFILL, ProcessRole.DECODE, ProcessRole.BOTH})
ROUTER_ROLES = frozenset({ProcessRole.ROUTER})


@dataclass(frozen=True, slots=True)
class Party:
    """What a process says of itself. `address`: under which others call it, "" = nobody does."""

    role: str
    address: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class Credentials:
    """One process's.

    Args:
        secret: of the cluster.
        incarnation: changes with every start of the process.
    """

    secret: bytes = field(repr=False)
    role: ProcessRole
    address: str = ""
    incarnation: str = field(default_factory=random_id)

    @property
    def party(self) -> Party:
        return Party(str(self.role), self.address, self.incarnation)

    def key(self, purpose: str) -> bytes:
        """A key of 32 bytes for one use of the secret, so that no MAC made for one can serve another."""
        return hmac.digest(self.secret, f"tandem {purpose}".encode(), "sha256")
