import pytest

from tandem.kube.call import KubeCall


@pytest.mark.parametrize(
    ("call", "method", "path"),
    [
        (KubeCall("list", "pods", "n"), "GET", "/api/v1/namespaces/n/pods"),
        (KubeCall("watch", "pods", "n"), "GET", "/api/v1/namespaces/n/pods"),
        (KubeCall("get", "pods", "n", "a"), "GET", "/api/v1/namespaces/n/pods/a"),
        (KubeCall("create", "leases", "n", "a", "g.io"), "POST", "/apis/g.io/v1/namespaces/n/leases"),
        (KubeCall("update", "leases", "n", "a", "g.io"), "PUT", "/apis/g.io/v1/namespaces/n/leases/a"),
        (
            KubeCall("patch", "deployments/scale", "n", "a", "apps"),
            "PATCH",
            "/apis/apps/v1/namespaces/n/deployments/a/scale",
        ),
        (KubeCall("get", "pods", "../x", "a/../b?c"), "GET", "/api/v1/namespaces/..%2Fx/pods/a%2F..%2Fb%3Fc"),
    ],
)
def test_a_call_is_asked_at_its_path(call: KubeCall, method: str, path: str) -> None:
    assert (call.method, call.path) == (method, path)


def test_a_call_names_itself_as_rbac_does() -> None:
    assert (
        str(KubeCall("patch", "deployments/scale", "n", "a", "apps")) == "patch deployments/scale 'a' in namespace 'n'"
    )
    assert str(KubeCall("list", "pods", "n")) == "list pods in namespace 'n'"
