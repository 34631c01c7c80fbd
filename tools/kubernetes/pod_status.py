"""Status of a pod as a kubelet reports it: phase, conditions and container statuses. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from tools.kubernetes.api import Object


def timestamp() -> str:
    """Now, as Kubernetes writes times."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(slots=True)
class ContainerState:
    """State of one container. `exit_code` is None while it runs or waits."""

    name: str
    image: str
    started_at: str | None = None
    finished_at: str | None = None
    exit_code: int | None = None
    waiting: str | None = "ContainerCreating"
    message: str = ""
    ready: bool = False
    started: bool = False
    num_restarts: int = 0
    last: dict[str, Any] = field(default_factory=dict)

    def state(self) -> Object:
        """`state` of a container status."""
        if self.exit_code is not None:
            reason = "Completed" if self.exit_code == 0 else "Error"
            times = {"startedAt": self.started_at, "finishedAt": self.finished_at}
            return {"terminated": {"exitCode": self.exit_code, "reason": reason, "message": self.message, **times}}
        if self.waiting is not None:
            return {"waiting": {"reason": self.waiting, "message": self.message}}
        return {"running": {"startedAt": self.started_at}}

    def status(self) -> Object:
        """One entry of `containerStatuses`."""
        return {
            "name": self.name,
            "image": self.image,
            "imageID": "",
            "ready": self.ready,
            "started": self.started,
            "restartCount": self.num_restarts,
            "state": self.state(),
            "lastState": self.last,
        }


def phase(restart_policy: str, containers: list[ContainerState]) -> str:
    """Pending, Running, Succeeded or Failed."""
    codes = [container.exit_code for container in containers]
    if restart_policy != "Always" and all(code == 0 for code in codes):
        return "Succeeded"
    if restart_policy == "Never" and None not in codes:
        return "Failed"
    return "Running" if any(container.started_at for container in containers) else "Pending"


def pod_status(
    pod: Object,
    containers: list[ContainerState],
    initialised: list[ContainerState],
    addresses: tuple[str, str | None],
    stopping: bool,
) -> Object:
    """The whole status; `addresses` are the host's and the pod's. A stopping pod is never ready."""
    ready = all(container.ready for container in containers) and not stopping
    gates = {gate["conditionType"] for gate in pod["spec"].get("readinessGates", [])}
    given = {one["type"]: one["status"] for one in pod.get("status", {}).get("conditions", [])}
    is_initialised = all(container.exit_code == 0 for container in initialised)
    conditions = {
        "PodScheduled": True,
        "Initialized": is_initialised,
        "ContainersReady": ready,
        "Ready": ready and all(given.get(gate) == "True" for gate in gates),
    }
    host, address = addresses
    status = {
        "phase": phase(pod["spec"].get("restartPolicy", "Always"), containers),
        "hostIP": host,
        "conditions": [condition(pod, name, value) for name, value in conditions.items()],
        "containerStatuses": [container.status() for container in containers],
        "initContainerStatuses": [container.status() for container in initialised],
    }
    if address is not None:
        status |= {"podIP": address, "podIPs": [{"ip": address}]}
    return status


def condition(pod: Object, name: str, value: bool) -> Object:
    """A condition, with the time of its last change kept."""
    status = "True" if value else "False"
    before = next((one for one in pod.get("status", {}).get("conditions", []) if one["type"] == name), None)
    changed = timestamp() if before is None or before["status"] != status else before["lastTransitionTime"]
    return {"type": name, "status": status, "lastTransitionTime": changed}
