import pytest

from tandem.kube.call import Call


@pytest.mark.parametrize(
    ("call", "method", "path"),
    [
        (Call("list", "pods", "n"), "GET", "/api/v1/namespaces/n/pods"),
        (Call("watch", "pods", "n"), "GET", "/api/v1/namespaces/n/pods"),
        (Call("get", "pods", "n", "a"), "GET", "/api/v1/namespaces/n/pods/a"),
        (Call("create", "pods/eviction", "n", "a"), "POST", "/api/v1/namespaces/n/pods/a/eviction"),
        (Call("create", "leases", "n", "a", "g.io"), "POST", "/apis/g.io/v1/namespaces/n/leases"),
        (Call("update", "leases", "n", "a", "g.io"), "PUT", "/apis/g.io/v1/namespaces/n/leases/a"),
        (
            Call("patch", "deployments/scale", "n", "a", "apps"),
            "PATCH",
            "/apis/apps/v1/namespaces/n/deployments/a/scale",
        ),
        (Call("get", "pods", "../x", "a/../b?c"), "GET", "/api/v1/namespaces/..%2Fx/pods/a%2F..%2Fb%3Fc"),
    ],
)
def test_a_call_is_asked_at_its_path(call: Call, method: str, path: str) -> None:
    assert (call.method, call.path) == (method, path)


def test_a_call_names_itself_as_rbac_does() -> None:
    assert str(Call("patch", "deployments/scale", "n", "a", "apps")) == "patch deployments/scale 'a' in namespace 'n'"
    assert str(Call("list", "pods", "n")) == "list pods in namespace 'n'"
