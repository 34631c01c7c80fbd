"""A container of a pod as arguments of `podman run`: command, mounts, limits, security context. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from tools.kubernetes.api import Object
from tools.kubernetes.environment import amount, expand

MEMORY_VOLUME = "memory:"


@dataclass(frozen=True, slots=True)
class Placement:
    """Place of one container of a pod.

    Args:
        name: of the container.
        address: of its pod.
        first: name of the pod's first container, whose network it shares; "" = it is the first.
        volumes: by name, a path of the host, or MEMORY_VOLUME and a size in bytes (empty = podman's default).
        pid_file: where it is written which process is the container's first.
    """

    name: str
    address: str
    first: str
    volumes: Mapping[str, str]
    pid_file: str


def run_arguments(pod: Object, container: Object, values: Mapping[str, str], where: Placement) -> list[str]:
    """Everything after `podman run`; `values` is the container's whole environment."""
    flags = ["--detach", "--name", where.name, "--pidfile", where.pid_file]
    flags += ["--label", f"tandem.pod={pod['metadata']['uid']}", "--pull", "never", "--no-healthcheck"]
    flags += [flag for name, value in values.items() for flag in ("--env", f"{name}={value}")]
    for mount in container.get("volumeMounts", []):
        flags += mount_arguments(mount, where.volumes[mount["name"]])
    flags += limit_arguments(container)
    flags += security_arguments(pod["spec"].get("securityContext") or {}, container.get("securityContext") or {})
    if "workingDir" in container:
        flags += ["--workdir", container["workingDir"]]
    command = [expand(word, values) for word in container.get("command", [])]
    arguments = [expand(word, values) for word in container.get("args", [])]
    if command:
        flags += ["--entrypoint", json.dumps(command)]
    return [*flags, container["image"], *arguments]


def mount_arguments(mount: Object, source: str) -> list[str]:
    """One volume at its place."""
    target = mount["mountPath"]
    if source.startswith(MEMORY_VOLUME):
        size = source.removeprefix(MEMORY_VOLUME)
        return ["--mount", f"type=tmpfs,destination={target},tmpfs-mode=1777" + (f",tmpfs-size={size}" if size else "")]
    if "subPath" in mount:
        source = f"{source}/{mount['subPath']}"
    return ["--volume", f"{source}:{target}" + (":ro" if mount.get("readOnly") else "")]


def limit_arguments(container: Object) -> list[str]:
    """Limits of memory and CPU."""
    limits = container.get("resources", {}).get("limits", {})
    flags = []
    if "memory" in limits:
        flags += ["--memory", str(int(amount(limits["memory"]))), "--memory-swap", str(int(amount(limits["memory"])))]
    if "cpu" in limits:
        flags += ["--cpus", f"{amount(limits['cpu']):g}"]
    return flags


def security_arguments(pod: Object, own: Object) -> list[str]:
    """User and capabilities; the container's own values override the pod's."""
    both = pod | own
    user, group = both.get("runAsUser"), both.get("runAsGroup")
    flags = []
    if user is not None:
        flags += ["--user", f"{user}:{group if group is not None else 0}"]
    groups = [*pod.get("supplementalGroups", []), *([pod["fsGroup"]] if "fsGroup" in pod else [])]
    flags += [flag for one in groups for flag in ("--group-add", str(one))]
    if own.get("readOnlyRootFilesystem"):
        flags += ["--read-only", "--read-only-tmpfs=false"]
    if own.get("allowPrivilegeEscalation") is False:
        flags += ["--security-opt", "no-new-privileges"]
    capabilities = own.get("capabilities") or {}
    flags += [flag for one in capabilities.get("drop", []) for flag in ("--cap-drop", one)]
    flags += [flag for one in capabilities.get("add", []) for flag in ("--cap-add", one)]
    return flags
