"""The Redis of the chart, started as its pod would start it: what its probe hears, and what it keeps."""

import contextlib
import os
import random
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from tandem.process.ports import free_ports
from tests.helm.cases import MINIMAL
from tests.helm.renders import rendered
from tests.helm.test_certificates import drawn
from tests.helpers.redis_server import MISSING

PASSWORD = "0123456789abcdef"
_READY_S = 10.0


def _has_ipv6_loopback() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def _skip_without_redis() -> None:
    if shutil.which("redis-server") is None or shutil.which("redis-cli") is None:
        pytest.skip(MISSING)


def _filled(words: Sequence[str]) -> list[str]:
    return [re.sub(r"\$\(REDIS_\w+_PASSWORD\)", PASSWORD, word) for word in words]


def _wait_until_it_answers(client: Redis, server: "subprocess.Popen[bytes]") -> None:
    deadline_s = time.monotonic() + _READY_S
    while True:
        try:
            assert client.ping()
            return
        except RedisConnectionError:
            assert server.poll() is None, "redis-server ended at once"
            assert time.monotonic() < deadline_s, "redis-server does not answer"
            time.sleep(0.02)


def _place(words: Sequence[str], directory: Path) -> list[str]:
    """The same with the pod's directories as those under `directory`."""
    here = {"/data": directory / "data", "/tmp": directory / "data"}
    return [str(here.get(word, word)).replace("/etc/tandem/tls", str(directory / "tls")) for word in _filled(words)]


def _mount_certificate(directory: Path) -> None:
    """A new one, of a new authority."""
    for place in ("data", "tls"):
        (directory / place).mkdir(exist_ok=True)
    for name, data in drawn(MINIMAL)["redis"].items():
        (directory / "tls" / name).write_bytes(data)


def _url(case: str) -> str:
    (url,) = [each["value"] for each in rendered(case).container("router")["env"] if each["name"] == "TANDEM_REDIS"]
    return str(url)


@contextlib.contextmanager
def _running(case: str, loopback: str, directory: Path, port: int) -> Iterator[Redis]:
    """The pod's server, and a client of the user accounts with the rendered URL's options; killed at the end."""
    container = rendered(case).container("redis")
    arguments = _place(container["args"], directory)
    has_tls = _url(case).startswith("rediss:")
    number = ["--tls-port" if has_tls else "--port", str(port)]
    server = subprocess.Popen(
        [*container["command"], *arguments, *number], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    # NOTE: the certificate names the service, which has no address here.
    options: dict[str, Any] = {"ssl": True, "ssl_ca_certs": str(directory / "tls/ca.crt"), "ssl_check_hostname": False}
    try:
        with Redis(
            host=loopback, port=port, username="accounts", password=PASSWORD, **(options if has_tls else {})
        ) as client:
            _wait_until_it_answers(client, server)
            yield client
    finally:
        server.kill()
        server.wait()


def _probe(
    case: str, port: int, directory: Path, password: str = PASSWORD, *, kind: str = "readinessProbe"
) -> "subprocess.CompletedProcess[str]":
    program, *asked = _place(rendered(case).container("redis")[kind]["exec"]["command"], directory)
    return subprocess.run(
        [program, "-p", str(port), *asked],
        env={**os.environ, "REDISCLI_AUTH": password},
        capture_output=True,
        text=True,
        timeout=_READY_S,
    )


@pytest.mark.parametrize(("case", "loopback"), [("minimal", "127.0.0.1"), ("ipv6", "::1"), ("plain-text", "127.0.0.1")])
def test_readiness_is_asked_where_the_server_listens(case: str, loopback: str, tmp_path: Path) -> None:
    _skip_without_redis()
    if loopback == "::1" and not _has_ipv6_loopback():
        pytest.skip("Redis is to listen at ::1, and this machine has no IPv6 loopback address")
    (port,) = free_ports(1, loopback, random.SystemRandom())
    _mount_certificate(tmp_path)
    with _running(case, loopback, tmp_path, port):
        done = _probe(case, port, tmp_path)
        assert (done.returncode, done.stdout.strip()) == (0, "PONG"), done.stdout + done.stderr
        assert _probe(case, port, tmp_path, "wrong").returncode != 0, "an error is no answer"


def test_redis_whose_certificate_is_outdated_is_started_anew(tmp_path: Path) -> None:
    """It reads its certificate when it starts. An error, as while it loads what it kept, is no reason."""
    _skip_without_redis()
    (port,) = free_ports(1, "127.0.0.1", random.SystemRandom())
    _mount_certificate(tmp_path)
    with _running("minimal", "127.0.0.1", tmp_path, port):
        assert _probe("minimal", port, tmp_path, "wrong", kind="livenessProbe").returncode == 0
        _mount_certificate(tmp_path)
        assert _probe("minimal", port, tmp_path, kind="livenessProbe").returncode != 0


def test_redis_answers_nobody_in_plain_text(tmp_path: Path) -> None:
    _skip_without_redis()
    (port,) = free_ports(1, "127.0.0.1", random.SystemRandom())
    _mount_certificate(tmp_path)
    with (
        _running("minimal", "127.0.0.1", tmp_path, port),
        Redis(port=port, username="accounts", password=PASSWORD) as client,
        pytest.raises(RedisConnectionError),
    ):
        client.ping()


@pytest.mark.parametrize(("case", "is_kept"), [("minimal", True), ("anonymous", False)])
def test_accounts_outlive_a_killed_redis(case: str, is_kept: bool, tmp_path: Path) -> None:
    """Regression: accounts were on by default, and gone with the pod."""
    _skip_without_redis()
    (port,) = free_ports(1, "127.0.0.1", random.SystemRandom())
    _mount_certificate(tmp_path)
    with _running(case, "127.0.0.1", tmp_path, port) as client:
        client.hset("{tandem:accounts}:keys", "k", "v")
    with _running(case, "127.0.0.1", tmp_path, port) as client:
        assert client.hget("{tandem:accounts}:keys", "k") == (b"v" if is_kept else None)
