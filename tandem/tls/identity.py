"""The identity in a process's certificate: one DNS name, `ROLE.DEPLOYMENT.tandem.internal`. No I/O.

A name rather than a URI, so that every issuer can write it (Helm's functions write no URIs) and gRPC can check it in
place of a host name, which changes with each pod. A deployment is one release of Tandem, `RELEASE.NAMESPACE`.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

_SUFFIX = ".tandem.internal"
_LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
_DEPLOYMENT = re.compile(rf"{_LABEL}(\.{_LABEL})*")
_MAX_CHARACTERS = 253  # of a DNS name


class CertifiedRole(StrEnum):
    """Role in a certificate. Prefill and decode workers have the same permissions, so they share one."""

    GATEWAY = "gateway"
    ROUTER = "router"
    WORKER = "worker"
    PLANNER = "planner"
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True)
class CertifiedName:
    """Identity in a certificate. `deployment`: as `RELEASE.NAMESPACE`; equal for all its processes."""

    role: CertifiedRole
    deployment: str

    def __str__(self) -> str:
        return dns_name(self.role, self.deployment)


def dns_name(role: str, deployment: str) -> str:
    """The DNS name that the certificate of a process must contain."""
    return f"{role}.{deployment}{_SUFFIX}"


def is_deployment(name: str) -> bool:
    """Whether `name` is a valid name of a deployment in certificates."""
    longest = max(len(dns_name(role, name)) for role in CertifiedRole)
    return longest <= _MAX_CHARACTERS and _DEPLOYMENT.fullmatch(name) is not None


def certified_name(dns_names: Iterable[str]) -> CertifiedName | None:
    """The identity among the DNS names of a certificate. None if there is none, or more than one."""
    found = {name for each in dns_names if (name := _parsed(each)) is not None}
    return found.pop() if len(found) == 1 else None


def _parsed(name: str) -> CertifiedName | None:
    """NOTE: a wildcard is no role."""
    role, _, rest = name.lower().partition(".")
    deployment = rest.removesuffix(_SUFFIX)
    if role not in set(CertifiedRole) or deployment == rest or not is_deployment(deployment):
        return None
    return CertifiedName(CertifiedRole(role), deployment)
