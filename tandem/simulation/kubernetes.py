"""Kubernetes API in memory, as far as planners need it: scales of two Deployments, their pods, and Leases.

Each write gives its object a new version; a write that names another version conflicts. Pods of a Deployment are
created and ended to match its scale; pods that are not ready, then younger ones, end first.
"""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.kube.api import KubeTransport
from tandem.kube.call import KubeCall
from tandem.kube.errors import KubeUnavailableError, error_of
from tandem.kube.read import written_moment
from tandem.simulation.fabric import Fabric
from tandem.simulation.node import Node

KUBERNETES = "kubernetes"
NAMESPACE = "default"
TIMEOUT_S = 10.0  # of a call

_Body = dict[str, Any]


@dataclass(slots=True)
class SimulatedPod:
    """A pod of the Deployment `role`. `ready_s`: since when it is ready; None = it is not. `is_ending`: it was told to
    end.
    """

    name: str
    role: str
    created_s: float
    ready_s: float | None = None
    is_ending: bool = False


@dataclass(frozen=True, slots=True)
class ScaleWrite:
    """A change of a Deployment's number of replicas by the node `writer`, at a time of the loop."""

    at_s: float
    writer: str
    deployment: str
    before: int
    after: int


class SimulatedKubernetes:
    """The API server and the controller of Deployments.

    Args:
        node: of the server, with its clocks.
        replicas: at first, by Deployment; their pods are called DEPLOYMENT-NUMBER, and are there.
        start, stop: begin a pod's process, and tell it to end, by its name.
        startup_s: from a pod's creation until its process begins.

    `on_call` is called before each answer, `on_write` with each change of a scale. `is_down`: nothing is answered.
    """

    def __init__(
        self,
        node: Node,
        replicas: Mapping[str, int],
        start: Callable[[str], None],
        stop: Callable[[str], None],
        startup_s: float,
    ) -> None:
        self.node = node
        self.is_down = False
        self.on_call: Callable[[], None] = lambda: None
        self.on_write: Callable[[ScaleWrite], None] = lambda write: None
        self.replicas = dict(replicas)
        self._start, self._stop, self._startup_s = start, stop, startup_s
        self._versions = itertools.count(1)
        self._scale_versions = {name: next(self._versions) for name in replicas}
        self._leases: dict[str, _Body] = {}
        self._numbers = {name: itertools.count(count) for name, count in replicas.items()}
        self.pods = {
            f"{role}-{number}": SimulatedPod(f"{role}-{number}", role, node.wall_s())
            for role, count in replicas.items()
            for number in range(count)
        }

    def holder(self, lease: str) -> str:
        """Identity of the holder of a Lease; "" = nobody."""
        return str(self._leases.get(lease, {"spec": {}})["spec"].get("holderIdentity", ""))

    def note_ready(self, name: str, *, is_ready: bool = True) -> None:
        if name in self.pods:
            self.pods[name].ready_s = self.node.wall_s() if is_ready else None

    def note_end(self, name: str) -> None:
        """Records that the process of a pod that was told to end has ended."""
        self.pods.pop(name, None)

    def answer(self, writer: str, call: KubeCall, body: Mapping[str, Any] | None) -> _Body:
        """Answers a call. Raises `KubeError` if a real server would refuse it."""
        self.on_call()
        match call.verb, call.resource:
            case "list", "pods":
                items = [_pod_body(pod) for pod in self.pods.values()]
                return {"kind": "PodList", "metadata": {"resourceVersion": "1"}, "items": items}
            case "get", "deployments/scale":
                return self._scale(call.name)
            case "patch", "deployments/scale" if body is not None:
                return self._rescale(writer, call, body)
            case "get", "leases":
                if call.name not in self._leases:
                    raise error_of(call, 404, {})
                return self._leases[call.name]
            case "create" | "update", "leases" if body is not None:
                return self._lease(call, body)
            case _:
                raise error_of(call, 405, {})

    def _scale(self, deployment: str) -> _Body:
        version = str(self._scale_versions[deployment])
        num_existing = sum(pod.role == deployment for pod in self.pods.values())
        return {
            "metadata": {"name": deployment, "resourceVersion": version},
            "spec": {"replicas": self.replicas[deployment]},
            "status": {"replicas": num_existing},
        }

    def _rescale(self, writer: str, call: KubeCall, body: Mapping[str, Any]) -> _Body:
        version = body.get("metadata", {}).get("resourceVersion")
        if version is not None and version != str(self._scale_versions[call.name]):
            raise error_of(call, 409, {})
        before, after = self.replicas[call.name], int(body["spec"]["replicas"])
        self.replicas[call.name] = after
        self._scale_versions[call.name] = next(self._versions)
        self.on_write(ScaleWrite(self.node.now_s(), writer, call.name, before, after))
        self._reconcile(call.name)
        return self._scale(call.name)

    def _lease(self, call: KubeCall, body: Mapping[str, Any]) -> _Body:
        known = self._leases.get(call.name or body["metadata"]["name"])
        version = body["metadata"].get("resourceVersion", "")
        if (known is None) != (call.verb == "create") or (
            known is not None and version != known["metadata"]["resourceVersion"]
        ):
            raise error_of(call, 409, {})
        name = body["metadata"]["name"]
        stored = {**body, "metadata": {"name": name, "resourceVersion": str(next(self._versions))}}
        self._leases[name] = stored
        return stored

    def _reconcile(self, role: str) -> None:
        there = [pod for pod in self.pods.values() if pod.role == role and not pod.is_ending]
        for _ in range(self.replicas[role] - len(there)):
            name = f"{role}-{next(self._numbers[role])}"
            self.pods[name] = SimulatedPod(name, role, self.node.wall_s())
            loop = asyncio.get_running_loop()
            loop.call_later(self._startup_s, self._begin, name, context=self.node.context)
        surplus = max(0, len(there) - self.replicas[role])
        for pod in sorted(there, key=lambda pod: (pod.ready_s is not None, -pod.created_s))[:surplus]:
            pod.is_ending = True
            self._stop(pod.name)

    def _begin(self, name: str) -> None:
        if name in self.pods:  # NOTE: one that was told to end before it began is gone
            self._start(name)


class SimulatedKubeTransport(KubeTransport):
    """Connection of one node to the API server; a call may be lost before or after it was executed."""

    def __init__(self, kubernetes: SimulatedKubernetes, fabric: Fabric, node: Node) -> None:
        self._kubernetes, self._fabric, self._node = kubernetes, fabric, node

    async def ask(
        self,
        call: KubeCall,
        *,
        query: Sequence[tuple[str, str]] = (),
        body: Mapping[str, Any] | None = None,
        content_type: str = "",
    ) -> Mapping[str, Any]:
        """See `KubeTransport`. NOTE: of label selectors it supports role=NAME only."""
        selected = dict(query).get("labelSelector", "").removeprefix("role=")
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await self._way(self._node.name, KUBERNETES)
                answer = self._kubernetes.answer(self._node.name, call, body)
                await self._way(KUBERNETES, self._node.name)
        except TimeoutError:
            raise KubeUnavailableError(call, f"no answer within {TIMEOUT_S:g} s") from None
        if selected:
            items = [item for item in answer["items"] if item["metadata"]["labels"]["role"] == selected]
            answer = {**answer, "items": items}
        return answer

    def follow(
        self, call: KubeCall, *, query: Sequence[tuple[str, str]], silence_s: float
    ) -> AsyncGenerator[Mapping[str, Any], None]:
        raise NotImplementedError("nobody watches pods in a simulation")

    async def close(self) -> None:
        """No effect: nothing is open."""

    async def _way(self, source: str, target: str) -> None:
        await asyncio.sleep(self._fabric.delay_s())
        if self._kubernetes.is_down or self._fabric.is_blocked(source, target):
            await asyncio.Event().wait()


def _pod_body(pod: SimulatedPod) -> _Body:
    meta: _Body = {
        "name": pod.name,
        "labels": {"role": pod.role},
        "creationTimestamp": written_moment(pod.created_s),
    }
    if pod.is_ending:
        meta["deletionTimestamp"] = written_moment(pod.created_s)
    ready = pod.ready_s is not None and not pod.is_ending
    conditions = [{"type": "Ready", "status": "True", "lastTransitionTime": written_moment(pod.ready_s or 0.0)}]
    return {"metadata": meta, "spec": {}, "status": {"phase": "Running", "conditions": conditions if ready else []}}
