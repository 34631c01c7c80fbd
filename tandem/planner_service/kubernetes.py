"""Implements `ScaleTargets` in Kubernetes by Deployments' scale subresource, and finds gateways by their pods' labels.

Only reads and writes; the caller decides whether to write. Failures of the API are `KubeError`s that name verb,
resource and remedy.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tandem.core.errors import UnavailableError
from tandem.kube.api import KubeApi
from tandem.kube.pod import Pod
from tandem.planner_service.targets import Pool, PoolReplicas, Replica

_ENDED = ("Succeeded", "Failed")
_METRICS_PORTS = ("metrics", "http")  # by name; the latter in pods of earlier releases


@dataclass(frozen=True, slots=True)
class PoolName:
    """Name of a pool's Deployment. `selector`: label selector of its pods; None = pods are not read."""

    deployment: str
    selector: str | None = None


class KubernetesTargets:
    """`ScaleTargets` of two Deployments."""

    def __init__(self, api: KubeApi, names: Mapping[Pool, PoolName]) -> None:
        self._api = api
        self._names = dict(names)

    async def read(self, pool: Pool) -> PoolReplicas:
        name = self._names[pool]
        scale = await self._api.read_scale(name.deployment)
        if name.selector is None:
            return PoolReplicas(num_wanted=scale.num_wanted)
        pods = (await self._api.list_pods(name.selector)).pods
        return PoolReplicas(num_wanted=scale.num_wanted, replicas=[_replica(pod) for pod in pods if _is_there(pod)])

    async def write(self, pool: Pool, num_replicas: int, seen: PoolReplicas) -> None:
        """Set a Deployment's replicas if they are still those of `seen`.

        NOTE: a Deployment's version also changes with its status, so the number is compared first, then the version.
        """
        deployment = self._names[pool].deployment
        now = await self._api.read_scale(deployment)
        if now.num_wanted != seen.num_wanted:
            raise UnavailableError(
                f"Deployment {deployment} was scaled from {seen.num_wanted} to {now.num_wanted} by somebody else"
            )
        await self._api.write_scale(deployment, num_replicas, now.resource_version)


class GatewayPods:
    """Finds gateways by their pods' labels."""

    def __init__(self, api: KubeApi, selector: str) -> None:
        self._api = api
        self._selector = selector

    async def find(self) -> Sequence[str]:
        """Returns host:port of each gateway that is ready.

        Raises:
            KubeError: the API call failed.
            UnavailableError: there is no gateway, or one has no metrics port.
        """
        pods = [pod for pod in (await self._api.list_pods(self._selector)).pods if pod.ip and pod.ready]
        if not pods:
            raise UnavailableError(f"no pod of {self._selector!r} is ready; is it the gateways' label selector?")
        for pod in pods:
            if not pod.ports.keys() & set(_METRICS_PORTS):
                raise UnavailableError(f"pod {pod.name} has no container port named {_METRICS_PORTS[0]}; name it so")
        return [_address(pod) for pod in pods]


def _replica(pod: Pod) -> Replica:
    return Replica(name=pod.name, created_s=pod.created_s or 0.0, ready_s=pod.ready_s if pod.ready else None)


def _is_there(pod: Pod) -> bool:
    return not pod.deleting and pod.phase not in _ENDED


def _address(pod: Pod) -> str:
    host = f"[{pod.ip}]" if ":" in pod.ip else pod.ip
    return f"{host}:{next(pod.ports[name] for name in _METRICS_PORTS if name in pod.ports)}"
