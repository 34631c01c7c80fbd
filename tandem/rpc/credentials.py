"""Credentials of a process: the cluster secret, its certificate, and the identity that it proves to peers.

The secret is only used as a key of message authentication codes. Nothing that is sent lets a reader compute it or prove
anything with it.
"""

import hmac
from dataclasses import dataclass, field
from enum import StrEnum

from tandem.core.addresses import is_loopback
from tandem.core.machine import random_id
from tandem.rpc.protocols import SPOKEN
from tandem.tls.files import TlsFiles
from tandem.tls.identity import CertifiedRole


class ProcessRole(StrEnum):
    """Role of a process in a cluster; determines the methods that it may call. OPERATOR: a tool run by a person."""

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
    """The certificate role that a process of this role needs. Raises ValueError for a name that is no role."""
    return CertifiedRole.WORKER if role in WORKER_ROLES else CertifiedRole(role)


@dataclass(frozen=True, slots=True)
class Party:
    """Identity that a process claims in a handshake. `address`: at which others call it; "" = it is not called.
    `incarnation`: id of this run of the process.
    """

    role: str
    address: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class Credentials:
    """Credentials of one process.

    Args:
        secret: of the cluster.
        address: at which others call it, host:port; "" = it is not called.
        incarnation: random id of this run of the process.
        tls: its certificate; None = calls are plain text.
        is_insecure: whether plain text may leave this machine.
        spoken: the oldest and the newest version of the protocol that it speaks.
    """

    secret: bytes = field(repr=False)
    role: ProcessRole
    address: str = ""
    incarnation: str = field(default_factory=random_id)
    tls: TlsFiles | None = None
    is_insecure: bool = False
    spoken: tuple[int, int] = SPOKEN

    @property
    def party(self) -> Party:
        return Party(str(self.role), self.address, self.incarnation)

    def may_talk_with(self, address: str) -> bool:
        """Whether calls to `address` (host:port) are allowed: they are encrypted, stay on this machine, or may be plain
        text.
        """
        return self.tls is not None or self.is_insecure or is_loopback(address.rpartition(":")[0])

    def key(self, purpose: str) -> bytes:
        """Derives a key of 32 bytes from the secret for one purpose, so that no MAC serves another purpose."""
        return hmac.digest(self.secret, f"tandem {purpose}".encode(), "sha256")
