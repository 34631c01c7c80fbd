"""Choice of the transport between two workers."""

from dataclasses import replace

import pytest

from tandem.core.errors import ConfigurationError, IncompatiblePeerError
from tandem.transport.choose import LinkPath, Site, choose

HERE = Site("boot-1", "pid:[1]", "user:[1] 0", "10", "cpu", "", has_rdma=False)
NEIGHBOUR = replace(HERE, process="11")
FAR = replace(HERE, host="boot-2", process="11")
RDMA = replace(HERE, has_rdma=True)
NAMELESS = replace(HERE, pid_namespace="unknown")  # as where there is no /proc
NO_WHEEL = "no NIXL wheel is installed"


@pytest.mark.parametrize(
    ("local", "remote", "name", "path"),
    [
        (HERE, HERE, "inproc", LinkPath.INPROC),
        (HERE, NEIGHBOUR, "cma", LinkPath.CMA),
        (HERE, FAR, "tcp", LinkPath.NETWORK),
        (replace(HERE, nixl=NO_WHEEL), NEIGHBOUR, "cma", LinkPath.CMA),
        (RDMA, replace(NEIGHBOUR, has_rdma=True), "cma", LinkPath.CMA),
        (HERE, replace(NEIGHBOUR, pid_namespace="pid:[2]"), "tcp", LinkPath.LOOPBACK),
        (HERE, replace(NEIGHBOUR, user="user:[1] 1000"), "tcp", LinkPath.LOOPBACK),
        (HERE, replace(HERE, pid_namespace="pid:[2]"), "tcp", LinkPath.LOOPBACK),
        (RDMA, replace(FAR, has_rdma=True), "nixl", LinkPath.RDMA),
        (RDMA, FAR, "tcp", LinkPath.NETWORK),
        (replace(RDMA, nixl=NO_WHEEL), replace(RDMA, host="boot-2"), "tcp", LinkPath.NETWORK),
        (RDMA, replace(RDMA, host="boot-2", nixl=NO_WHEEL), "tcp", LinkPath.NETWORK),
        (RDMA, replace(RDMA, process="11", user="user:[1] 1000"), "nixl", LinkPath.RDMA),
        (NAMELESS, replace(NAMELESS, process="11"), "tcp", LinkPath.LOOPBACK),
        (replace(HERE, device="cuda:0"), replace(NEIGHBOUR, device="cuda:1"), "nixl", LinkPath.CUDA_IPC),
    ],
)
def test_the_fastest_safe_transport(local: Site, remote: Site, name: str, path: LinkPath) -> None:
    choice = choose(local, remote)
    assert (choice.name, choice.path) == (name, path)
    assert choice.reason


def test_the_reason_names_what_was_not_possible() -> None:
    assert NO_WHEEL in choose(HERE, replace(FAR, nixl=NO_WHEEL)).reason
    assert "other users" in choose(HERE, replace(NEIGHBOUR, user="user:[1] 1000")).reason
    assert "emulated over TCP" in choose(HERE, FAR).reason


def test_a_choice_by_hand() -> None:
    assert choose(HERE, NEIGHBOUR, "tcp").path is LinkPath.LOOPBACK
    assert choose(HERE, NEIGHBOUR, "cma").path is LinkPath.CMA
    assert choose(HERE, HERE, "nixl").path is LinkPath.NIXL_CMA
    assert choose(HERE, FAR, "nixl").path is LinkPath.UNKNOWN_NIXL


@pytest.mark.parametrize(
    ("local", "remote", "override", "words"),
    [
        (HERE, HERE, "carrier pigeon", "unknown; choose auto or one of inproc, cma, nixl, tcp"),
        (HERE, NEIGHBOUR, "inproc", "two processes"),
        (HERE, FAR, "cma", "two hosts"),
        (HERE, replace(FAR, nixl=NO_WHEEL), "nixl", NO_WHEEL),
        (replace(HERE, device="cuda:0"), replace(FAR, device="cuda:0"), "auto", "no tcp: it sends cpu memory"),
        (HERE, replace(NEIGHBOUR, device="cuda:0"), "auto", "blocks live in cpu here and in cuda:0"),
    ],
)
def test_what_cannot_work_is_refused(local: Site, remote: Site, override: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        choose(local, remote, override)


def test_a_site_survives_the_wire() -> None:
    here = Site.here("cpu")
    assert Site.from_fields(here.to_fields()) == here
    assert choose(here, here).name == "inproc"


@pytest.mark.parametrize("damage", [{"host": 5}, {"has_rdma": "yes"}, {"user": None}])
def test_a_site_with_other_fields_is_refused(damage: dict[str, object]) -> None:
    with pytest.raises(IncompatiblePeerError, match="describes its site"):
        Site.from_fields(HERE.to_fields() | damage)
