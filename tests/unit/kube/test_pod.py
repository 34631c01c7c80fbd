import copy
from typing import Any

import pytest

from tandem.kube.pod import Pod, pod_of, version_of

FULL: dict[str, Any] = {
    "metadata": {
        "name": "decode-0",
        "uid": "u",
        "labels": {"tandem.dev/role": "decode"},
        "creationTimestamp": "2026-01-01T00:00:00Z",
        "resourceVersion": "7",
    },
    "spec": {
        "nodeName": "n1",
        "containers": [
            {"name": "side"},
            {"name": "worker", "ports": [{"name": "grpc", "containerPort": 7900}, {"containerPort": 9}]},
        ],
    },
    "status": {
        "phase": "Running",
        "podIP": "10.0.0.1",
        "conditions": [
            {"type": "PodScheduled", "status": "True"},
            {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:01:30Z"},
        ],
    },
}


def changed(path: str, value: Any) -> dict[str, Any]:
    found = copy.deepcopy(FULL)
    *parents, last = path.split(".")
    inner: Any = found
    for name in parents:
        inner = inner[int(name)] if name.isdecimal() else inner[name]
    inner[last] = value
    return found


def test_a_pod_is_read() -> None:
    pod = pod_of(FULL)
    assert pod == Pod(
        name="decode-0",
        uid="u",
        ip="10.0.0.1",
        labels={"tandem.dev/role": "decode"},
        phase="Running",
        ready=True,
        node="n1",
        created_s=1767225600.0,
        ready_s=1767225690.0,
        ports={"grpc": 7900},
    )


def test_a_pod_that_just_began_has_little() -> None:
    assert pod_of({"metadata": {"name": "a"}, "status": {"conditions": None}}) == Pod(name="a")


def test_a_pod_told_to_end_and_one_that_is_not_ready() -> None:
    assert pod_of(changed("metadata.deletionTimestamp", "2026-01-01T00:02:00Z")).deleting
    for status in ("False", "Unknown"):
        pod = pod_of(changed("status.conditions.1.status", status))
        assert not pod.ready
        assert pod.ready_s is None


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("metadata", "x"),
        ("metadata.name", None),
        ("metadata.name", 3),
        ("metadata.labels", {"a": 1}),
        ("metadata.creationTimestamp", "yesterday"),
        ("spec.containers", {}),
        ("spec.containers.1.ports", [3]),
        ("spec.containers.1.ports", [{"name": "grpc", "containerPort": "7900"}]),
        ("spec.containers.1.ports", [{"name": "grpc"}]),
        ("status.podIP", ["10.0.0.1"]),
        ("status.conditions", "Ready"),
    ],
)
def test_what_is_no_pod_is_not_guessed_at(path: str, value: Any) -> None:
    with pytest.raises(ValueError, match=path.rpartition(".")[2] + "|containerPort|ports"):
        pod_of(changed(path, value))


def test_a_list_without_a_version_is_none() -> None:
    assert version_of(FULL) == "7"
    for wrong in ({}, {"metadata": {"resourceVersion": ""}}, {"metadata": {"resourceVersion": 7}}):
        with pytest.raises(ValueError, match="resourceVersion"):
            version_of(wrong)
