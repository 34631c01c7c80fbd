"""The volumes of a pod as folders of the host: config maps, secrets, projected tokens, emptyDir and hostPath.

Owns the folder it is given and nothing outside it; hostPath is handed through as it is.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from tools.kubernetes.api import Api, Object
from tools.kubernetes.environment import MissingReferenceError, Sources, amount, decoded, field
from tools.kubernetes.pod_spec import MEMORY_VOLUME

_REFERENCES = {
    "secretRef": "secrets",
    "secretKeyRef": "secrets",
    "configMapRef": "configmaps",
    "configMapKeyRef": "configmaps",
}


async def read_references(api: Api, pod: Object) -> dict[str, dict[str, dict[str, bytes]]]:
    """Every secret and config map that the pod names, decoded, by kind and name; what is not there is left out."""
    found: dict[str, dict[str, dict[str, bytes]]] = {"secrets": {}, "configmaps": {}}
    namespace = pod["metadata"]["namespace"]
    for kind, name in sorted(referred(pod)):
        thing = await api.find(f"/api/v1/namespaces/{namespace}/{kind}/{name}")
        if thing is not None:
            found[kind][name] = decoded(thing)
    return found


def referred(pod: Object) -> set[tuple[str, str]]:
    """Kinds and names of what the pod's volumes and environments come from."""
    spec = pod["spec"]
    names: set[tuple[str, str]] = set()
    for container in [*spec.get("initContainers", []), *spec["containers"]]:
        entries = [*container.get("envFrom", []), *(one.get("valueFrom", {}) for one in container.get("env", []))]
        names |= {(_REFERENCES[key], entry[key]["name"]) for entry in entries for key in entry if key in _REFERENCES}
    for volume in spec.get("volumes", []):
        for source in [volume, *volume.get("projected", {}).get("sources", [])]:
            if "secret" in source:
                names.add(("secrets", source["secret"].get("secretName") or source["secret"]["name"]))
            if "configMap" in source:
                names.add(("configmaps", source["configMap"]["name"]))
    return names


class Volumes:
    """Makes the volumes of one pod under `folder`; `remove` takes them away again."""

    def __init__(self, api: Api, folder: Path) -> None:
        self._api = api
        self._folder = folder

    async def make(self, sources: Sources) -> dict[str, str]:
        """Folder of each volume, by name. Raises MissingReferenceError or ApiError."""
        self._folder.mkdir(parents=True, exist_ok=True)
        return {one["name"]: await self._one(one, sources) for one in sources.pod["spec"].get("volumes", [])}

    def remove(self) -> None:
        """Forget them, except what hostPath named."""
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _one(self, volume: Object, sources: Sources) -> str:
        if "hostPath" in volume:
            return _host_path(volume["hostPath"])
        if "emptyDir" in volume and volume["emptyDir"].get("medium") == "Memory":
            limit = volume["emptyDir"].get("sizeLimit")
            return MEMORY_VOLUME + ("" if limit is None else str(int(amount(limit))))
        folder = self._folder / volume["name"]
        folder.mkdir(exist_ok=True)
        # NOTE: containers run as users of their own; Kubernetes gives them the folder by fsGroup, we by its mode.
        folder.chmod(0o777)
        if "emptyDir" not in volume:
            for source in volume.get("projected", {}).get("sources", [volume]):
                _write(folder, await self._files(source, sources))
        return str(folder)

    async def _files(self, source: Object, sources: Sources) -> dict[str, bytes]:
        if "serviceAccountToken" in source:
            projection = source["serviceAccountToken"]
            return {projection["path"]: await self._token(sources.pod, projection)}
        if "downwardAPI" in source:
            items = source["downwardAPI"]["items"]
            return {item["path"]: field(item["fieldRef"]["fieldPath"], sources).encode() for item in items}
        for key, things in (("secret", sources.secrets), ("configMap", sources.config_maps)):
            if key in source:
                return _selected(source[key], things)
        raise MissingReferenceError(f"volume source {sorted(source)} is not supported by this kubelet")

    async def _token(self, pod: Object, projection: Object) -> bytes:
        account = pod["spec"].get("serviceAccountName", "default")
        path = f"/api/v1/namespaces/{pod['metadata']['namespace']}/serviceaccounts/{account}/token"
        spec: Object = {"expirationSeconds": projection.get("expirationSeconds", 3600)}
        if "audience" in projection:
            spec["audiences"] = [projection["audience"]]
        asked = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        answer = await self._api.create(path, asked)
        return str(answer["status"]["token"]).encode()


def _selected(source: Object, things: Mapping[str, Mapping[str, bytes]]) -> dict[str, bytes]:
    name = source.get("secretName") or source["name"]
    if name not in things:
        if source.get("optional"):
            return {}
        raise MissingReferenceError(f"volume names {name!r}, which is not there")
    items = source.get("items")
    if items is None:
        return dict(things[name])
    return {item["path"]: things[name][item["key"]] for item in items}


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        file.chmod(0o644)


def _host_path(source: Object) -> str:
    path = Path(source["path"])
    if source.get("type") == "DirectoryOrCreate":
        path.mkdir(parents=True, exist_ok=True)
    elif not path.exists():
        raise MissingReferenceError(f"hostPath {path} does not exist")
    return str(path)
