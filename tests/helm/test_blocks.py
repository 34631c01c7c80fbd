"""Settings in a pool's block of values reach its pods, and no other pod."""

from typing import Any

import pytest

from tandem import __version__
from tests.helm.cases import MINIMAL, Values
from tests.helm.renders import rendered
from tests.helpers.helm import NAMESPACE, POOLS, Object, Rendered, at, merged, render

DIGEST, OTHER_DIGEST = "sha256:" + "0" * 64, "sha256:" + "1" * 64
STANDARD_RESOURCES = {"cpu", "memory", "ephemeral-storage"}


def _env(made: Rendered, pool: str, name: str) -> Any:
    return made.env(pool)[name].get("value")


def test_devices_are_asked_for() -> None:
    limits = rendered("decode-devices").container("decode")["resources"]["limits"]
    assert limits["nvidia.com/gpu"] == limits["rdma/hca"] == "1"
    assert _env(rendered("decode-devices"), "decode", "UCX_TLS") == "rc"
    assert _env(rendered("decode-devices"), "decode", "UCX_NET_DEVICES") == "mlx5_0:1"
    assert rendered("accelerators").container("decode")["resources"]["requests"]["nvidia.com/gpu"] == "1"
    assert "nvidia.com/mig-1g.10gb" in rendered("own-resource").container("decode")["resources"]["limits"]
    assert "acme.com/npu" in rendered("own-vendor").container("decode")["resources"]["limits"]
    unasked = rendered("rdma-unasked").container("decode")["resources"]["limits"]
    assert set(unasked) - STANDARD_RESOURCES == {"nvidia.com/gpu"}
    plain = rendered("minimal").container("decode")["resources"]
    assert set(plain["limits"]) | set(plain["requests"]) <= STANDARD_RESOURCES
    claim = rendered("claim-request").container("decode")["resources"]["claims"]
    assert claim == [{"name": "gpu", "request": "gpu"}]


def test_blocks_of_a_pool_reach_its_pod_alone() -> None:
    for pool in POOLS:
        made = rendered(f"{pool}-placed")
        spec = made.deployment(pool)["spec"]["template"]["spec"]
        assert spec["nodeSelector"] == {"a": "b"}
        assert spec["affinity"] == {"podAntiAffinity": {}}
        assert spec["tolerations"] == [{"operator": "Exists"}]
        assert (spec["priorityClassName"], spec["runtimeClassName"]) == ("high", "nvidia")
        assert spec["readinessGates"] == [{"conditionType": "example.com/gate"}]
        others = set(POOLS) - {pool, "planner"}
        assert not any("nodeSelector" in made.deployment(other)["spec"]["template"]["spec"] for other in others)


def test_containers_take_what_they_are_given() -> None:
    for pool in POOLS:
        made = rendered(f"{pool}-container")
        container = made.container(pool)
        assert container["args"] == ["--log-level", "debug"]
        assert container["command"] == ["python3", "-m", f"services.{pool}"]
        assert _env(made, pool, "WHERE") == NAMESPACE
        assert container["envFrom"] == [{"configMapRef": {"name": "more"}}]
        assert container["resources"]["limits"] == {"cpu": "4", "memory": "2Gi"}
        assert {"name": "more", "mountPath": "/more"} in container["volumeMounts"]
        shm = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "2Gi"}}
        assert shm in made.deployment(pool)["spec"]["template"]["spec"]["volumes"]


def test_a_digest_is_of_its_own_image() -> None:
    """Regression: the digest of images.worker stood behind a pool's own repository, where no such image is."""
    made = rendered("images")
    assert made.container("gateway")["image"] == "registry.example.com/tandem-control:1.2.3"
    assert made.container("prefill")["image"] == f"tandem-worker@{DIGEST}"
    assert made.container("decode")["image"] == f"registry.example.com/tandem-worker-cuda:{__version__}"


@pytest.mark.parametrize(
    ("image", "reference"),
    [
        ({}, f"tandem-worker@{DIGEST}"),
        ({"pullPolicy": "Always"}, f"tandem-worker@{DIGEST}"),
        ({"tag": "2.0"}, "tandem-worker:2.0"),
        ({"repository": "other"}, "other:1.0"),
        ({"repository": "other", "tag": "2.0"}, "other:2.0"),
        ({"repository": "other", "digest": OTHER_DIGEST}, f"other@{OTHER_DIGEST}"),
        ({"digest": OTHER_DIGEST}, f"tandem-worker@{OTHER_DIGEST}"),
    ],
)
def test_a_pool_can_have_another_image(image: Values, reference: str) -> None:
    made = render(merged(MINIMAL, {"images": {"worker": {"tag": "1.0", "digest": DIGEST}}, "decode": {"image": image}}))
    assert made.container("decode")["image"] == reference


def test_false_over_true_is_kept() -> None:
    """Regression: Helm's `merge` takes false for nothing said, so a root file system could not be made writable."""
    security = rendered("writable-root").container("decode")["securityContext"]
    assert security["readOnlyRootFilesystem"] is False
    assert rendered("run-as-root").deployment("decode")["spec"]["template"]["spec"]["securityContext"]["runAsUser"] == 0


@pytest.mark.parametrize(
    ("capabilities", "wanted"),
    [
        ({}, {"drop": ["ALL"], "add": ["IPC_LOCK"]}),
        (
            {"capabilities": {"drop": ["ALL"], "add": ["SYS_PTRACE"]}},
            {"drop": ["ALL"], "add": ["SYS_PTRACE", "IPC_LOCK"]},
        ),
        ({"capabilities": {"add": ["IPC_LOCK"]}}, {"add": ["IPC_LOCK"]}),
        ({"capabilities": None}, {"add": ["IPC_LOCK"]}),
    ],
)
def test_ipc_lock_comes_to_the_capabilities_that_are_given(capabilities: Values, wanted: Object) -> None:
    """Regression: it took the place of what was added."""
    made = render(merged(MINIMAL, at("decode", {"rdma": {"ipcLock": True}, "securityContext": capabilities})))
    assert made.container("decode")["securityContext"]["capabilities"] == wanted


def _job(values: Values) -> Object:
    (job,) = render(merged(MINIMAL, at("load.enabled", True), values)).of_kind("Job")
    return job


@pytest.mark.parametrize(
    "values",
    [
        at("load.settings.rate", 2.5),
        at("images.control.tag", "9.9.9"),
        at("gateway.service.port", 80),
        at("podSecurityContext.runAsUser", 20000),
        at("imagePullSecrets", [{"name": "pull"}]),
        at("commonLabels", {"team": "inference"}),
    ],
)
def test_another_pod_of_the_load_test_is_another_job(values: Values) -> None:
    """Regression: its name followed the `load` block alone, and Kubernetes refuses a Job whose template changes."""
    before, after = _job({}), _job(values)
    assert before["spec"]["template"] != after["spec"]["template"]
    assert before["metadata"]["name"] != after["metadata"]["name"]


def test_a_load_test_that_is_not_changed_stays() -> None:
    before, after = _job({}), _job(at("load", {"ttlSecondsAfterFinished": 60, "backoffLimit": 2}))
    assert before["spec"]["template"] == after["spec"]["template"]
    assert before["metadata"]["name"] == after["metadata"]["name"]
