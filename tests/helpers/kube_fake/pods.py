"""Life of pods in the API server: how they begin and are told to end."""

from collections.abc import Mapping, Sequence
from typing import Any

from tests.helpers.kube_fake.store import ApiError, Store, now


def new_pod(found: Mapping[str, Any]) -> dict[str, Any]:
    """New pod, which is pending; a status that its creator gives is ignored."""
    if not (found.get("spec") or {}).get("containers"):
        raise ApiError(422, "Invalid", "spec.containers: Required value")
    return {**found, "status": {"phase": "Pending"}}


def end_pod(store: Store, namespace: str, name: str, grace_s: int | None) -> dict[str, Any]:
    """A pod that runs on a node is told; one that does not, or without grace, is gone."""
    key = ("pods", namespace, name)
    pod = store.get(key)
    grace_s = pod["spec"].get("terminationGracePeriodSeconds", 30) if grace_s is None else grace_s
    if not pod["spec"].get("nodeName") or grace_s == 0:
        return store.delete(key)
    pod["metadata"].update(deletionTimestamp=now(), deletionGracePeriodSeconds=grace_s)
    return store.replace(key, pod)


def pod_body(
    name: str,
    ip: str = "",
    labels: Mapping[str, str] | None = None,
    *,
    is_ready: bool = False,
    ports: Mapping[str, int] | None = None,
    node: str = "",
    conditions: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """A pod as the API would show it; `ports` as {"grpc": 7900}."""
    listed = [{"name": port, "containerPort": number} for port, number in (ports or {"grpc": 7900}).items()]
    ready = {"type": "Ready", "status": "True" if is_ready else "False", "lastTransitionTime": now()}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": dict(labels or {})},
        "spec": {
            "containers": [{"name": "main", "image": "tandem", "ports": listed}],
            **({"nodeName": node} if node else {}),
        },
        "status": {
            "phase": "Running" if ip else "Pending",
            **({"podIP": ip, "podIPs": [{"ip": ip}]} if ip else {}),
            "conditions": [ready, *conditions],
        },
    }
