"""Life of pods in the API server: how they begin, are told to end, and may be evicted."""

from collections.abc import Mapping, Sequence
from typing import Any

from tests.helpers.kube_fake.store import ApiError, Store, now


def new_pod(found: Mapping[str, Any]) -> dict[str, Any]:
    """Whoever creates a pod has no say in its status."""
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


def require_disruption_allowed(store: Store, namespace: str, name: str) -> None:
    pod = store.get(("pods", namespace, name))
    for budget in store.list("poddisruptionbudgets", namespace):
        wanted = budget["spec"]["selector"]["matchLabels"]
        if not _has(pod, wanted):
            continue
        num_ready = sum(_is_ready(other) for other in store.list("pods", namespace) if _has(other, wanted))
        if num_ready - 1 < budget["spec"]["minAvailable"]:
            message = "Cannot evict pod as it would violate the pod's disruption budget."
            raise ApiError(429, "TooManyRequests", message, ["DisruptionBudget"], 10)


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


def _has(pod: Mapping[str, Any], wanted: Mapping[str, str]) -> bool:
    labels = pod["metadata"].get("labels") or {}
    return all(labels.get(name) == value for name, value in wanted.items())


def _is_ready(pod: Mapping[str, Any]) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or []
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)
