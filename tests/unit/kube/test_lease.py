import pytest

from tandem.kube.lease import Lease, lease_body, lease_of

LEASE = Lease(
    name="planner",
    holder="a_1",
    duration_s=15,
    acquired_s=1767225600.25,
    renewed_s=1767225690.5,
    num_transitions=3,
    resource_version="9",
)


def test_a_lease_survives_being_written_and_read() -> None:
    body = lease_body(LEASE)
    assert body["spec"]["renewTime"] == "2026-01-01T00:01:30.500000Z"
    assert lease_of(body) == LEASE


def test_nobodys_lease_has_no_times() -> None:
    free = Lease(name="planner", holder="", duration_s=1)
    assert "renewTime" not in lease_body(free)["spec"]
    assert "resourceVersion" not in lease_body(free)["metadata"]
    assert lease_of(lease_body(free)) == free


@pytest.mark.parametrize(
    "wrong", [{}, {"metadata": {"name": "a"}, "spec": {"leaseDurationSeconds": "15"}}, {"metadata": {"name": 1}}]
)
def test_what_is_no_lease_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"name|leaseDurationSeconds"):
        lease_of(wrong)
