"""Credentials of a process: the cluster secret, its certificate, and the name and role that it proves to others.

The secret is only ever a key. Nothing that is sent lets a reader compute it or prove anything with it.
"""

import hmac
from dataclasses import dataclass, field
from enum import StrEnum

from tandem.core.addresses import is_loopback
from tandem.core.machine import random_id
from tandem.tls.files import TlsFiles
from tandem.tls.identity import CertifiedRole


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


def certified_role(role: str) -> CertifiedRole:
    """Which role the certificate of a process of that role is for."""
    return CertifiedRole.WORKER if role in WORKER_ROLES else CertifiedRole(role)


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
        tls: its certificate; None = calls are plain text.
        is_insecure: whether plain text may leave this machine.
    """

    secret: bytes = field(repr=False)
    role: ProcessRole
    address: str = ""
    incarnation: str = field(default_factory=random_id)
    tls: TlsFiles | None = None
    is_insecure: bool = False

    @property
    def party(self) -> Party:
        return Party(str(self.role), self.address, self.incarnation)

    def may_talk_with(self, address: str) -> bool:
        """Whether what is said with `address` (host:port) may be sent as these credentials have it sent."""
        return self.tls is not None or self.is_insecure or is_loopback(address.rpartition(":")[0])

    def key(self, purpose: str) -> bytes:
        """A key of 32 bytes for one use of the secret, so that no MAC made for one can serve another."""
        return hmac.digest(self.secret, f"tandem {purpose}".encode(), "sha256")
