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

import pytest
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from tandem.process.ports import free_ports
from tests.helm.renders import rendered
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


@contextlib.contextmanager
def _running(case: str, loopback: str, directory: Path, port: int) -> Iterator[Redis]:
    """The pod's server, and a client of the user accounts; killed at the end."""
    container = rendered(case).container("redis")
    arguments = [str(directory) if word in ("/data", "/tmp") else word for word in _filled(container["args"])]
    server = subprocess.Popen(
        [*container["command"], *arguments, "--port", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        with Redis(host=loopback, port=port, username="accounts", password=PASSWORD) as client:
            _wait_until_it_answers(client, server)
            yield client
    finally:
        server.kill()
        server.wait()


def _probe(case: str, port: int, password: str = PASSWORD) -> "subprocess.CompletedProcess[str]":
    program, *asked = rendered(case).container("redis")["readinessProbe"]["exec"]["command"]
    return subprocess.run(
        [program, "-p", str(port), *asked],
        env={**os.environ, "REDISCLI_AUTH": password},
        capture_output=True,
        text=True,
        timeout=_READY_S,
    )


@pytest.mark.parametrize(("case", "loopback"), [("minimal", "127.0.0.1"), ("ipv6", "::1")])
def test_readiness_is_asked_where_the_server_listens(case: str, loopback: str, tmp_path: Path) -> None:
    _skip_without_redis()
    if loopback == "::1" and not _has_ipv6_loopback():
        pytest.skip("Redis is to listen at ::1, and this machine has no IPv6 loopback address")
    (port,) = free_ports(1, loopback, random.SystemRandom())
    with _running(case, loopback, tmp_path, port):
        done = _probe(case, port)
        assert (done.returncode, done.stdout.strip()) == (0, "PONG"), done.stdout + done.stderr
        assert _probe(case, port, "wrong").returncode != 0, "an error is no answer"


@pytest.mark.parametrize(("case", "is_kept"), [("minimal", True), ("anonymous", False)])
def test_accounts_outlive_a_killed_redis(case: str, is_kept: bool, tmp_path: Path) -> None:
    """Regression: accounts were on by default, and gone with the pod."""
    _skip_without_redis()
    (port,) = free_ports(1, "127.0.0.1", random.SystemRandom())
    with _running(case, "127.0.0.1", tmp_path, port) as client:
        client.hset("{tandem:accounts}:keys", "k", "v")
    with _running(case, "127.0.0.1", tmp_path, port) as client:
        assert client.hget("{tandem:accounts}:keys", "k") == (b"v" if is_kept else None)
