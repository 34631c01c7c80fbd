"""A coordination.k8s.io Lease: who holds it, and since when. Values only; the rules are in `leader`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tandem.kube import read


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Times are seconds since 1970 by the holder's wall clock, so nobody else may compute with them.

    Args:
        holder: "" = nobody.
        resource_version: of the object that was read; "" when it is to be created.
    """

    name: str
    holder: str
    duration_s: int
    acquired_s: float | None = None
    renewed_s: float | None = None
    num_transitions: int = 0
    resource_version: str = ""


def lease_of(found: Mapping[str, Any]) -> Lease:
    """Raises `ValueError` naming the field that is wrong."""
    meta, spec = read.mapping(found, "metadata"), read.mapping(found, "spec")
    return Lease(
        name=read.text(meta, "name", None),
        holder=read.text(spec, "holderIdentity"),
        duration_s=read.number(spec, "leaseDurationSeconds"),
        acquired_s=read.moment_s(spec, "acquireTime"),
        renewed_s=read.moment_s(spec, "renewTime"),
        num_transitions=read.number(spec, "leaseTransitions"),
        resource_version=read.text(meta, "resourceVersion"),
    )


def lease_body(lease: Lease) -> dict[str, Any]:
    """As the API wants it."""
    spec: dict[str, Any] = {
        "holderIdentity": lease.holder,
        "leaseDurationSeconds": lease.duration_s,
        "leaseTransitions": lease.num_transitions,
    }
    for name, moment in (("acquireTime", lease.acquired_s), ("renewTime", lease.renewed_s)):
        if moment is not None:
            spec[name] = read.written_moment(moment)
    meta = {"name": lease.name, **({"resourceVersion": lease.resource_version} if lease.resource_version else {})}
    return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": meta, "spec": spec}
