"""Pods that are only played: real controllers and a real scheduler over nodes with accelerators, and no container."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from tests.kubernetes.journal import Journal
from tools.kubernetes.api import MERGE, Object
from tools.kubernetes.cluster import Cluster, running_cluster
from tools.kubernetes.control_plane import ControlPlane

_DEPLOYMENTS = "/apis/apps/v1/namespaces/default/deployments"
_PODS = "/api/v1/namespaces/default/pods"
_WAIT_S = 60.0


def deployment(num_replicas: int, num_gpus: int) -> Object:
    container = {"name": "c", "image": "none", "resources": {"limits": {"nvidia.com/gpu": str(num_gpus)}}}
    template = {"metadata": {"labels": {"app": "gpus"}}, "spec": {"containers": [container]}}
    spec = {"replicas": num_replicas, "selector": {"matchLabels": {"app": "gpus"}}, "template": template}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "gpus"}, "spec": spec}


async def until(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    deadline_s = time.monotonic() + _WAIT_S
    while not await condition():
        assert time.monotonic() < deadline_s, f"not {what} after {_WAIT_S:g} s"
        await asyncio.sleep(0.1)


def test_accelerators_are_counted(plane: ControlPlane, journal: Journal, tmp_path: Path) -> None:
    """Two nodes of 8 GPUs hold four pods of 4; a fifth waits until one is gone."""

    async def scenario(cluster: Cluster) -> float:
        async def num_ready() -> int:
            return int((await cluster.api.get(f"{_DEPLOYMENTS}/gpus"))["status"].get("readyReplicas", 0))

        async def is_full() -> bool:
            return await num_ready() == 4

        async def is_refused() -> bool:
            conditions = [one["status"].get("conditions", []) for one in await cluster.api.items(_PODS)]
            return any(one.get("reason") == "Unschedulable" for each in conditions for one in each)

        async def is_gone() -> bool:
            return not await cluster.api.items(_PODS)

        begun_s = time.monotonic()
        await cluster.api.create(_DEPLOYMENTS, deployment(5, 4))
        await until(is_full, "four pods ready")
        took_s = time.monotonic() - begun_s
        await until(is_refused, "the fifth refused")
        await cluster.api.patch(f"{_DEPLOYMENTS}/gpus/scale", {"spec": {"replicas": 0}}, MERGE)
        await until(is_gone, "every pod gone")
        await cluster.api.delete(f"{_DEPLOYMENTS}/gpus")
        return took_s

    async def run() -> float:
        async with running_cluster(plane, tmp_path, journal.tell, "instant") as cluster:
            return await scenario(cluster)

    journal.tell(f"played pods: 4 of 5 pods of 4 GPUs placed on two nodes of 8 and ready in {asyncio.run(run()):.1f} s")
