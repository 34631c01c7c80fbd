"""The Redis of the chart, started as its pod would start it, answers the pod's probe."""

import os
import random
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from tandem.serving.ports import free_ports
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


@pytest.mark.parametrize(("case", "loopback"), [("minimal", "127.0.0.1"), ("ipv6", "::1")])
def test_readiness_is_asked_where_the_server_listens(case: str, loopback: str, tmp_path: Path) -> None:
    if shutil.which("redis-server") is None or shutil.which("redis-cli") is None:
        pytest.skip(MISSING)
    if loopback == "::1" and not _has_ipv6_loopback():
        pytest.skip("this machine has no IPv6 loopback")
    container = rendered(case).container("redis")
    (port,) = free_ports(1, loopback, random.SystemRandom())
    own = ["--port", str(port), "--dir", str(tmp_path)]
    server = subprocess.Popen(
        [*container["command"], *_filled(container["args"]), *own], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        with Redis(host=loopback, port=port, username="cluster", password=PASSWORD) as client:
            _wait_until_it_answers(client, server)
        program, *asked = container["readinessProbe"]["exec"]["command"]
        done = subprocess.run(
            [program, "-p", str(port), *asked],
            env={**os.environ, "REDISCLI_AUTH": PASSWORD},
            capture_output=True,
            text=True,
            timeout=_READY_S,
        )
        assert (done.returncode, done.stdout.strip()) == (0, "PONG"), done.stdout + done.stderr
    finally:
        server.kill()
        server.wait()
