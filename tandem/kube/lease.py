"""Parses and writes a coordination.k8s.io Lease: its holder and times. `candidate` decides what to write."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tandem.kube import read


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A lease. Times are seconds since 1970 by the holder's wall clock, so other processes must not compute with
    them.

    Args:
        holder: "" = none.
        resource_version: of the object that was read; "" for a lease to be created.
    """

    name: str
    holder: str
    duration_s: int
    acquired_s: float | None = None
    renewed_s: float | None = None
    num_transitions: int = 0
    resource_version: str = ""


def lease_of(found: Mapping[str, Any]) -> Lease:
    """Parses a lease. Raises `ValueError` naming the field that is wrong."""
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
    """The lease as the API's JSON object."""
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
