"""Reach of UCX from elsewhere. UCX's port takes writes into memory from all who connect."""

import ipaddress
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import psutil
import pytest

from tandem.core.errors import ConfigurationError
from tandem.transport.card import Identity
from tandem.transport.nixl.bindings import environment_defaults, rdma_ports, unavailable_reason
from tandem.transport.nixl.exposure import Listener, check_exposure, listeners
from tandem.transport.nixl.transport import NixlTransport
from tests.helpers.transport_pools import COMPATIBILITY, pool_of

SECRET = b"known to peers alone"
HOSTS = ("127.0.0.1", "127.3.2.1", *(("::1",) if socket.has_dualstack_ipv6() else ()))
needs_nixl = pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))


def _outside() -> list[str]:
    """This machine's IPv4 addresses on interfaces that are up, without loopback."""
    found = psutil.net_if_addrs()
    return [
        entry.address
        for name, stats in psutil.net_if_stats().items()
        for entry in found.get(name, ())
        if stats.isup and entry.family == socket.AF_INET and not entry.address.startswith("127.")
    ]


def listener(host: str) -> Listener:
    return Listener("1", ipaddress.ip_address(host), 80)


@pytest.fixture
def sockets() -> Iterator[dict[str, int]]:
    """Listening ones: the port by host."""
    with ExitStack() as opened:
        families = {host: socket.AF_INET6 if ":" in host else socket.AF_INET for host in HOSTS}
        found = {
            host: opened.enter_context(socket.create_server((host, 0), family=family))
            for host, family in families.items()
        }
        yield {host: server.getsockname()[1] for host, server in found.items()}


def test_every_listener_of_this_process_is_seen(sockets: dict[str, int]) -> None:
    found = {(str(listener.host), listener.port) for listener in listeners()}
    assert set(sockets.items()) <= found


def test_a_closed_listener_is_gone() -> None:
    before = listeners()
    with socket.create_server(("127.0.0.1", 0)):
        assert len(listeners() - before) == 1
    assert listeners() <= before


@pytest.mark.parametrize(
    ("host", "bind_host"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("127.0.0.1", "10.1.2.3"),
        ("::1", "127.0.0.1"),
        ("10.1.2.3", "10.1.2.3"),
        ("10.1.2.3", "0.0.0.0"),
        ("10.1.2.3", "::"),
        ("10.1.2.3", ""),
        ("fd00::1", "fd00::1"),
    ],
)
def test_what_is_within_the_bind_address_is_warned_of(
    host: str, bind_host: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        check_exposure([listener(host)], bind_host)
    assert "can write into this worker's memory" in caplog.text


@pytest.mark.parametrize(
    ("host", "bind_host"),
    [
        ("10.1.2.3", "127.0.0.1"),
        ("10.1.2.3", "localhost"),
        ("10.1.2.3", "10.1.2.4"),
        ("0.0.0.0", "127.0.0.1"),
        ("0.0.0.0", "10.1.2.3"),
        ("::", "127.0.0.1"),
        ("fd00::1", "::1"),
        ("10.1.2.3", "no.such.name.invalid"),
    ],
)
def test_what_is_outside_is_refused_with_the_socket_and_the_remedy(host: str, bind_host: str) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        check_exposure([listener("127.0.0.1"), listener(host)], bind_host)
    for words in (str(listener(host)), f"bind={bind_host}", "UCX_TLS", "UCX_NET_DEVICES"):
        assert words in str(refusal.value)


def test_ucx_is_held_to_the_rdma_ports_there_are(tmp_path: Path) -> None:
    for port in ("mlx5_1/ports/1", "mlx5_0/ports/2", "mlx5_0/ports/1"):
        (tmp_path / port).mkdir(parents=True)
    ports = rdma_ports(tmp_path)
    assert environment_defaults(ports)["UCX_NET_DEVICES"] == "mlx5_0:1,mlx5_0:2,mlx5_1:1"


def test_without_rdma_ucx_is_held_to_loopback(tmp_path: Path) -> None:
    assert environment_defaults(rdma_ports(tmp_path / "infiniband"))["UCX_NET_DEVICES"] == "lo"


@needs_nixl
def test_nixl_listens_nowhere() -> None:
    """UCX listened on a random port of every interface, and whoever sent one packet there wrote into KV blocks."""
    before = listeners()
    transport = NixlTransport(pool_of(np.zeros((4, 4096), dtype=np.uint8)), Identity(COMPATIBILITY, SECRET))
    assert listeners() <= before
    transport.close()


@needs_nixl
def test_nixl_makes_no_segment_that_others_may_write() -> None:
    """UCX's System V segments are open to the user's group; what is written there it takes for a peer's messages."""
    transport = NixlTransport(pool_of(np.zeros((4, 4096), dtype=np.uint8)), Identity(COMPATIBILITY, SECRET))
    rows = [line.split() for line in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]]
    assert not [row for row in rows if int(row[4]) == os.getpid()]
    for path in Path("/proc/self/fd").iterdir():
        if path.is_symlink() and "/ucx_shm" in os.readlink(path):
            assert path.stat().st_mode & 0o077 == 0
    transport.close()


@needs_nixl
def test_an_environment_that_opens_a_port_on_loopback_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    transport = NixlTransport(pool_of(np.zeros((4, 4096), dtype=np.uint8)), Identity(COMPATIBILITY, SECRET))
    transport.close()
    assert "UCX listens at 127.0.0.1:" in caplog.text
    assert "UCX_TLS is 'tcp'" in caplog.text


@needs_nixl
@pytest.mark.skipif(not _outside(), reason="this machine has no address but loopback ones")
def test_an_environment_that_opens_a_port_to_the_network_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables win over what we set, on purpose; and clusters set them for MPI."""
    before = listeners()
    monkeypatch.setenv("UCX_TLS", "all")
    monkeypatch.setenv("UCX_NET_DEVICES", "all")
    pool = pool_of(np.zeros((4, 4096), dtype=np.uint8))
    with pytest.raises(ConfigurationError, match=r"UCX listens at .*, outside bind=127\.0\.0\.1"):
        NixlTransport(pool, Identity(COMPATIBILITY, SECRET))
    assert listeners() <= before
    NixlTransport(pool, Identity(COMPATIBILITY, SECRET), "0.0.0.0").close()
