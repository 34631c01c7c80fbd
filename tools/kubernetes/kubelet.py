"""Stands in for the kubelets of all nodes: makes the nodes, keeps them alive, and runs the pods bound to them.

`podman` pods are containers on a bridge of this machine, `process` pods processes with networks of their own there;
`instant` pods only say that they are ready.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Protocol

import httpx

from tools.kubernetes.api import ApiError, Object
from tools.kubernetes.host import HOST_ADDRESS, Host, tell_failure
from tools.kubernetes.instant_worker import InstantWorker
from tools.kubernetes.pod_status import timestamp
from tools.kubernetes.pod_worker import PodWorker

_HEARTBEAT_S = 5.0
_LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """A node and what may be asked of it. The resources need not exist; the scheduler counts them."""

    name: str
    resources: Mapping[str, str] = field(
        default_factory=lambda: {
            "cpu": "64",
            "memory": "512Gi",
            "ephemeral-storage": "1Ti",
            "pods": "110",
            "nvidia.com/gpu": "8",
            "rdma/ib": "8",
        }
    )
    labels: Mapping[str, str] = field(default_factory=dict)


class Worker(Protocol):
    """The runner of one pod."""

    def update(self, pod: Object | None) -> None: ...

    async def run(self) -> None: ...


MODES: dict[str, Callable[[Object, Host], Worker]] = {
    "podman": PodWorker,
    "process": PodWorker,
    "instant": InstantWorker,
}


class Kubelet:
    """The kubelets of `nodes`. `run` serves until cancelled and leaves no container."""

    def __init__(self, host: Host, nodes: list[NodeSpec], mode: str) -> None:
        self._host = host
        self._nodes = nodes
        self._make = MODES[mode]
        self._workers: dict[str, tuple[Worker, asyncio.Task[None]]] = {}

    async def register(self) -> None:
        """Make the nodes known. Raises ApiError."""
        for node in self._nodes:
            await self._host.api.create("/api/v1/nodes", node_object(node))
            await self._beat(node.name)

    async def unregister(self) -> None:
        """Take the nodes away again."""
        for node in self._nodes:
            await self._host.api.delete(f"/api/v1/nodes/{node.name}")

    async def run(self) -> None:
        """Run pods until cancelled."""
        beating = asyncio.create_task(self._beat_for_ever())
        try:
            async for pods in self._host.api.follow("/api/v1/pods"):
                self._reconcile(pods)
        finally:
            tasks = [beating, *(task for _, task in self._workers.values())]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _reconcile(self, pods: Mapping[str, Object]) -> None:
        names = {node.name for node in self._nodes}
        for uid, pod in pods.items():
            if pod["spec"].get("nodeName") not in names:
                continue
            if uid not in self._workers:
                if is_over(pod):
                    continue
                worker = self._make(pod, self._host)
                self._workers[uid] = (worker, self._start(worker, pod["metadata"]["name"]))
            self._workers[uid][0].update(pod)
        for uid, (worker, task) in list(self._workers.items()):
            if uid not in pods:
                worker.update(None)
            if task.done() and uid not in pods:
                del self._workers[uid]

    def _start(self, worker: Worker, name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(worker.run())
        task.add_done_callback(lambda done: tell_failure(done, f"the worker of pod {name}", self._host.journal))
        return task

    async def _beat_for_ever(self) -> None:
        while True:
            for node in self._nodes:
                try:
                    await self._beat(node.name)
                except (httpx.HTTPError, ApiError):
                    continue
            await asyncio.sleep(_HEARTBEAT_S)

    async def _beat(self, name: str) -> None:
        spec = {
            "holderIdentity": name,
            "leaseDurationSeconds": 40,
            "renewTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        }
        lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": name}, "spec": spec}
        try:
            await self._host.api.patch(f"{_LEASES}/{name}", {"spec": spec}, "application/merge-patch+json")
        except ApiError as error:
            if error.status != 404:
                raise
            await self._host.api.create(_LEASES, lease)
        await self._host.api.patch(f"/api/v1/nodes/{name}/status", {"status": {"conditions": [ready_condition()]}})


def is_over(pod: Object) -> bool:
    """Whether its containers have ended for good."""
    return pod.get("status", {}).get("phase") in ("Succeeded", "Failed")


def ready_condition() -> Object:
    """A node that is well, as of now."""
    now = timestamp()
    times = {"lastHeartbeatTime": now, "lastTransitionTime": now}
    return {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "", **times}


def node_object(node: NodeSpec) -> Object:
    """The node as the API wants it."""
    labels = {
        "kubernetes.io/hostname": node.name,
        "kubernetes.io/os": "linux",
        "kubernetes.io/arch": "amd64",
        "topology.kubernetes.io/zone": "zone-a",
        **node.labels,
    }
    status = {
        "capacity": dict(node.resources),
        "allocatable": dict(node.resources),
        "conditions": [ready_condition()],
        "addresses": [{"type": "InternalIP", "address": HOST_ADDRESS}, {"type": "Hostname", "address": node.name}],
        "nodeInfo": {
            **dict.fromkeys(("machineID", "systemUUID", "bootID", "kernelVersion", "osImage"), ""),
            "containerRuntimeVersion": "podman",
            "kubeletVersion": "v1.20.2",
            "kubeProxyVersion": "v1.20.2",
            "operatingSystem": "linux",
            "architecture": "amd64",
        },
    }
    metadata = {"name": node.name, "labels": labels}
    return {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "status": status}
