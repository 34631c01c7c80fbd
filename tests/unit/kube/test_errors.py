from typing import Any

import pytest

from tandem.kube.call import KubeCall
from tandem.kube.errors import (
    ConflictError,
    ExpiredError,
    KubeError,
    KubeUnavailableError,
    NotFoundError,
    RefusedError,
    UnauthorizedError,
    error_of,
)

SCALE = KubeCall("patch", "deployments/scale", "prod", "decode", "apps")


@pytest.mark.parametrize(
    ("call", "code", "status", "kind"),
    [
        (SCALE, 401, {}, UnauthorizedError),
        (SCALE, 404, {}, NotFoundError),
        (SCALE, 409, {}, ConflictError),
        (SCALE, 410, {}, ExpiredError),
        (SCALE, 422, {}, RefusedError),
        (SCALE, 429, {"message": "too many requests"}, KubeUnavailableError),
        (SCALE, 500, {}, KubeUnavailableError),
        (SCALE, 503, {}, KubeUnavailableError),
    ],
)
def test_each_status_is_an_error_of_its_own(
    call: KubeCall, code: int, status: dict[str, Any], kind: type[KubeError]
) -> None:
    error = error_of(call, code, status, 3.0)
    assert type(error) is kind
    assert str(call) in str(error)
    assert error.retry_after_s == 3.0


def test_a_missing_rule_is_spelt_out() -> None:
    said = str(error_of(SCALE, 403, {"message": "forbidden by x"}))
    for part in ("apiGroups: ['apps']", "resources: ['deployments/scale']", "verbs: [patch]", "'decode'", "prod"):
        assert part in said
    assert "forbidden by x" in said
    assert "verbs: [get, list, watch]" in str(error_of(KubeCall("watch", "pods", "prod"), 403, {}))


def test_creating_is_never_allowed_by_name() -> None:
    said = str(error_of(KubeCall("create", "leases", "prod", "l", "coordination.k8s.io"), 403, {}))
    assert "resourceNames" not in said
    assert "verbs: [create]" in said
