"""Parses pods from the API's JSON, reduced to the fields that Tandem uses; values of lists and events of pods."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tandem.kube import read


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """A pod. Times are seconds since 1970.

    Args:
        ip: "" until it has one.
        ready: the Ready condition: containers and readiness gates.
        deleting: it is terminating and may still be serving.
        ready_s: since when it is ready; None while it is not.
        ports: container ports that have a name.
    """

    name: str
    uid: str = ""
    ip: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    phase: str = ""
    ready: bool = False
    deleting: bool = False
    node: str = ""
    created_s: float | None = None
    ready_s: float | None = None
    ports: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PodList:
    """All pods that match a selector, as of `resource_version`."""

    pods: tuple[Pod, ...]
    resource_version: str


@dataclass(frozen=True, slots=True)
class PodEvent:
    """An event of a watch. `kind`: added, modified, deleted, or bookmark, which has no pod.

    All events up to `resource_version` have been delivered.
    """

    kind: str
    pod: Pod | None
    resource_version: str


def pod_of(found: Mapping[str, Any]) -> Pod:
    """Parses a pod. Raises `ValueError` naming the field that is wrong."""
    meta, spec, status = read.mapping(found, "metadata"), read.mapping(found, "spec"), read.mapping(found, "status")
    ready = _ready_condition(status)
    return Pod(
        name=read.text(meta, "name", None),
        uid=read.text(meta, "uid"),
        ip=read.text(status, "podIP"),
        labels=read.string_mapping(meta, "labels"),
        phase=read.text(status, "phase"),
        ready=ready is not None,
        deleting=read.moment_s(meta, "deletionTimestamp") is not None,
        node=read.text(spec, "nodeName"),
        created_s=read.moment_s(meta, "creationTimestamp"),
        ready_s=None if ready is None else read.moment_s(ready, "lastTransitionTime"),
        ports=_ports(spec),
    )


def version_of(found: Mapping[str, Any]) -> str:
    """The resource version of an object or list. Raises `ValueError` when it has none."""
    version = read.text(read.mapping(found, "metadata"), "resourceVersion")
    if not version:
        raise ValueError("metadata.resourceVersion is missing")
    return version


def _ready_condition(status: Mapping[str, Any]) -> Mapping[str, Any] | None:
    for condition in read.items(status, "conditions"):
        if condition.get("type") == "Ready" and condition.get("status") == "True":
            return condition
    return None


def _ports(spec: Mapping[str, Any]) -> Mapping[str, int]:
    ports = [port for container in read.items(spec, "containers") for port in read.items(container, "ports")]
    return {read.text(port, "name"): read.number(port, "containerPort", None) for port in ports if port.get("name")}
