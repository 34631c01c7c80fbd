"""Pods that are only played: real controllers and a real scheduler over nodes with accelerators, and no container."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from tests.kubernetes.journal import Journal
from tools.kubernetes.api import MERGE, Object
from tools.kubernetes.cluster import Cluster, running_cluster
from tools.kubernetes.control_plane import ControlPlane
from tools.kubernetes.groups import NAME_LABEL, SETS, is_ready, running_groups

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


def group_set(num_groups: int, size: int) -> Object:
    pod = {"metadata": {"labels": {"app": "g"}}, "spec": {"containers": [{"name": "c", "image": "none"}]}}
    template = {"size": size, "restartPolicy": "RecreateGroupOnPodRestart", "workerTemplate": pod}
    spec = {"replicas": num_groups, "leaderWorkerTemplate": template}
    api = SETS[len("/apis/") :].rpartition("/")[0]
    return {"apiVersion": api, "kind": "LeaderWorkerSet", "metadata": {"name": "g"}, "spec": spec}


def test_a_group_goes_with_each_of_its_pods(plane: ControlPlane, journal: Journal, tmp_path: Path) -> None:
    """The stand-in for the controller of LeaderWorkerSets behaves as documented, and leaves nothing behind."""
    own = "/apis/leaderworkerset.x-k8s.io/v1/namespaces/default/leaderworkersets"

    async def scenario(cluster: Cluster) -> None:
        async def pods() -> dict[str, Object]:
            found = await cluster.api.items(_PODS, labelSelector=f"{NAME_LABEL}=g")
            ready = [pod for pod in found if is_ready(pod) and "deletionTimestamp" not in pod["metadata"]]
            return {pod["metadata"]["name"]: pod for pod in ready}

        async def are(names: set[str]) -> bool:
            return set(await pods()) == names

        await cluster.api.create(own, group_set(2, 2))
        everyone = {"g-0", "g-0-0", "g-1", "g-1-0"}
        await until(lambda: are(everyone), "two groups of two pods ready")
        (told,) = (await pods())["g-1-0"]["spec"]["containers"]
        assert told["env"][0] == {"name": "LWS_LEADER_ADDRESS", "value": "g-1.g.default"}
        for victim in ("g-0-0", "g-0"):
            before = {name: pod["metadata"]["uid"] for name, pod in (await pods()).items()}
            await cluster.api.delete(f"{_PODS}/{victim}")

            async def is_anew(before: dict[str, str] = before) -> bool:
                now = {name: pod["metadata"]["uid"] for name, pod in (await pods()).items()}
                anew = {name for name, uid in now.items() if uid != before[name]}
                return (set(now), anew) == (everyone, {"g-0", "g-0-0"})

            await until(is_anew, f"the group of {victim} anew and the other as it was")
        await cluster.api.patch(f"{own}/g/scale", {"spec": {"replicas": 1}}, MERGE)
        await until(lambda: are({"g-0", "g-0-0"}), "one group left")
        await cluster.api.delete(f"{own}/g")
        await until(lambda: are(set()), "every pod gone")

    async def run() -> None:
        async with (
            running_cluster(plane, tmp_path, journal.tell, "instant") as cluster,
            running_groups(cluster.api, journal.tell),
        ):
            await scenario(cluster)

    asyncio.run(run())
