"""Stands in for the controller of LeaderWorkerSets: does what its documentation says of groups that are made anew as a
whole, out of real StatefulSets.

A set has one StatefulSet of leaders, and each leader owns one of the other pods of its group. When a pod of a group
restarts or goes, its leader is deleted, and garbage collection takes the others. New templates are not rolled out.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import AsyncIterator, Callable, Mapping

import httpx

from tools.kubernetes.api import MERGE, Api, ApiError, Object
from tools.kubernetes.host import tell_failure

GROUP, VERSION, PLURAL = "leaderworkerset.x-k8s.io", "v1", "leaderworkersets"
SETS = f"/apis/{GROUP}/{VERSION}/{PLURAL}"
NAME_LABEL, INDEX_LABEL = "leaderworkerset.sigs.k8s.io/name", "leaderworkerset.sigs.k8s.io/worker-index"
_CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
_STATEFUL_SETS = "/apis/apps/v1/statefulsets"
_PODS = "/api/v1/pods"
_RETRY_S = 0.5

DEFINITION: Object = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": f"{PLURAL}.{GROUP}"},
    "spec": {
        "group": GROUP,
        "names": {"kind": "LeaderWorkerSet", "plural": PLURAL, "singular": "leaderworkerset", "shortNames": ["lws"]},
        "scope": "Namespaced",
        "versions": [
            {
                "name": VERSION,
                "served": True,
                "storage": True,
                "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}},
                "subresources": {
                    "status": {},
                    "scale": {
                        "specReplicasPath": ".spec.replicas",
                        "statusReplicasPath": ".status.replicas",
                        "labelSelectorPath": ".status.hpaPodSelector",
                    },
                },
            }
        ],
    },
}


class Groups:
    """`run` serves until cancelled. `journal` has a line for each group that is made anew."""

    def __init__(self, api: Api, journal: Callable[[str], None]) -> None:
        self._api, self._journal = api, journal
        self._changed = asyncio.Event()
        self._found: dict[str, Mapping[str, Object]] = {}
        self._told: set[str] = set()

    async def run(self) -> None:
        paths = (SETS, _STATEFUL_SETS, _PODS)
        async with asyncio.TaskGroup() as tasks:
            for path in paths:
                tasks.create_task(self._follow(path))
            while True:
                await self._changed.wait()
                self._changed.clear()
                if all(path in self._found for path in paths):
                    await self._settle()

    async def _follow(self, path: str) -> None:
        async for objects in self._api.follow(path):
            self._found[path] = dict(objects)
            self._changed.set()

    async def _settle(self) -> None:
        """One look at all sets; what the API refuses is tried again."""
        for one in self._found[SETS].values():
            try:
                if "deletionTimestamp" not in one["metadata"]:
                    await self._settle_one(one)
            except (ApiError, httpx.HTTPError):
                asyncio.get_running_loop().call_later(_RETRY_S, self._changed.set)

    async def _settle_one(self, one: Object) -> None:
        name = one["metadata"]["name"]
        stateful = {each["metadata"]["name"]: each for each in self._of(_STATEFUL_SETS, name)}
        pods = self._of(_PODS, name)
        if name not in stateful:
            await self._create(one, "/api/v1", "services", headless_service(one))
            await self._create(one, "/apis/apps/v1", "statefulsets", leaders(one))
        elif stateful[name]["spec"]["replicas"] != one["spec"].get("replicas", 1):
            wanted = {"spec": {"replicas": one["spec"].get("replicas", 1)}}
            await self._api.patch(_path(one, "/apis/apps/v1", f"statefulsets/{name}"), wanted, MERGE)
        first = [pod for pod in pods if pod["metadata"]["labels"][INDEX_LABEL] == "0"]
        num_ready = 0
        for leader in first:
            others = stateful.get(leader["metadata"]["name"])
            if "deletionTimestamp" in leader["metadata"]:
                continue
            if others is None:
                await self._create(one, "/apis/apps/v1", "statefulsets", followers(one, leader))
            group = [leader, *(pod for pod in pods if others is not None and _owner(pod) == others["metadata"]["uid"])]
            await self._make_anew_if_broken(one, leader, group)
            num_ready += len(group) == _size(one) and all(map(is_ready, group))
        await self._tell(one, len(first), num_ready)

    async def _make_anew_if_broken(self, one: Object, leader: Object, group: list[Object]) -> None:
        broken = next((pod for pod in group if _has_restarted(pod) or "deletionTimestamp" in pod["metadata"]), None)
        if broken is None:
            return
        name, uid = leader["metadata"]["name"], leader["metadata"]["uid"]
        if uid not in self._told:
            self._told.add(uid)
            self._journal(f"group {name} is made anew, since {broken['metadata']['name']} restarts or goes")
        body = {"propagationPolicy": "Foreground", "preconditions": {"uid": uid}}
        await self._api.delete(_path(one, "/api/v1", f"pods/{name}"), body)

    async def _tell(self, one: Object, num_replicas: int, num_ready: int) -> None:
        selector = f"{NAME_LABEL}={one['metadata']['name']},{INDEX_LABEL}=0"
        status = {"replicas": num_replicas, "readyReplicas": num_ready, "hpaPodSelector": selector}
        if one.get("status") != status:
            path = _path(one, f"/apis/{GROUP}/{VERSION}", f"{PLURAL}/{one['metadata']['name']}/status")
            await self._api.patch(path, {"status": status}, MERGE)

    async def _create(self, one: Object, version: str, plural: str, body: Object) -> None:
        """NOTE: what is there already may be of a group that is going; it is made once that has gone."""
        try:
            await self._api.create(_path(one, version, plural), body)
        except ApiError as error:
            if error.status != 409:
                raise

    def _of(self, path: str, name: str) -> list[Object]:
        found = self._found[path].values()
        return [each for each in found if each["metadata"].get("labels", {}).get(NAME_LABEL) == name]


def headless_service(one: Object) -> Object:
    """By which pods find their leader before it is ready."""
    name = one["metadata"]["name"]
    spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {NAME_LABEL: name}}
    return {"apiVersion": "v1", "kind": "Service", "metadata": _metadata(name, name, one), "spec": spec}


def leaders(one: Object) -> Object:
    """The StatefulSet of all leaders, which are called like their groups."""
    name, template = one["metadata"]["name"], one["spec"]["leaderWorkerTemplate"]
    pod = template.get("leaderTemplate", template["workerTemplate"])
    # NOTE: the controller writes the address into each pod; here each pod makes it from its own name.
    own = {"name": "LWS_GROUP_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
    address = f"$(LWS_GROUP_NAME).{name}.{one['metadata']['namespace']}"
    return _stateful_set(
        _metadata(name, name, one), one["spec"].get("replicas", 1), pod, "0", [own, *_told_to(one, address)]
    )


def followers(one: Object, leader: Object) -> Object:
    """The StatefulSet of the other pods of a leader's group.

    NOTE: the controller has them count from 1, which StatefulSets of 1.20 cannot: the first one's name ends in 0.
    """
    name, group = one["metadata"]["name"], leader["metadata"]["name"]
    address = f"{group}.{name}.{one['metadata']['namespace']}"
    pod = one["spec"]["leaderWorkerTemplate"]["workerTemplate"]
    return _stateful_set(_metadata(group, name, leader), _size(one) - 1, pod, "1", _told_to(one, address))


def _stateful_set(metadata: Object, num_replicas: int, pod: Object, index: str, told: list[Object]) -> Object:
    """`index`: of the first of its pods in a group."""
    labels = {NAME_LABEL: metadata["labels"][NAME_LABEL], INDEX_LABEL: index, "tandem.test/set": metadata["name"]}
    pod = copy.deepcopy(pod)
    pod["metadata"]["labels"] |= labels
    for container in [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]:
        container["env"] = [*told, *container.get("env", [])]
    spec = {
        "replicas": num_replicas,
        "serviceName": labels[NAME_LABEL],
        "podManagementPolicy": "Parallel",
        "selector": {"matchLabels": labels},
        "template": pod,
    }
    return {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": metadata, "spec": spec}


def _told_to(one: Object, address: str) -> list[Object]:
    return [{"name": "LWS_LEADER_ADDRESS", "value": address}, {"name": "LWS_GROUP_SIZE", "value": str(_size(one))}]


def _metadata(name: str, of_set: str, owner: Object) -> Object:
    reference = {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }
    return {"name": name, "labels": {NAME_LABEL: of_set}, "ownerReferences": [reference]}


def _path(one: Object, version: str, rest: str) -> str:
    return f"{version}/namespaces/{one['metadata']['namespace']}/{rest}"


def _size(one: Object) -> int:
    return int(one["spec"]["leaderWorkerTemplate"].get("size", 1))


def _owner(thing: Object) -> str | None:
    return next((str(each["uid"]) for each in thing["metadata"].get("ownerReferences", [])), None)


def _has_restarted(pod: Object) -> bool:
    return any(each.get("restartCount", 0) > 0 for each in pod.get("status", {}).get("containerStatuses", []))


def is_ready(pod: Object) -> bool:
    conditions = pod.get("status", {}).get("conditions", [])
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


@contextlib.asynccontextmanager
async def running_groups(api: Api, journal: Callable[[str], None]) -> AsyncIterator[None]:
    """LeaderWorkerSets are known and served for the time of the block."""
    await api.create(_CRDS, DEFINITION)
    while await api.find(SETS) is None:
        await asyncio.sleep(_RETRY_S)
    running = asyncio.create_task(Groups(api, journal).run())
    running.add_done_callback(lambda task: tell_failure(task, "the controller of groups", journal))
    try:
        yield
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await api.delete(f"{_CRDS}/{DEFINITION['metadata']['name']}")
