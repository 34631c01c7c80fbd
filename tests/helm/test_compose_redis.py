"""Redis of docker/compose.yaml, started by the commands written there: TLS, its users, and who is given which file."""

import asyncio
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoPermissionError

from tandem.process.ports import free_ports
from tandem.redis_client import answered_within, connect
from tandem.tls.redis_certificate import create_certificate
from tests.helpers.compose import compose_services, filled
from tests.helpers.helm import Object
from tests.helpers.redis_server import MISSING

PASSWORD = "0123456789abcdef"
_READY_S = 10.0
SERVICES = compose_services()
REDIS, DRAWING = SERVICES["redis"], SERVICES["redis-certificate"]


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    """Of a server that is started as compose does, after its certificate; killed at the end."""
    if shutil.which("redis-server") is None or shutil.which("redis-cli") is None:
        pytest.skip(MISSING)
    (number,) = free_ports(1, "127.0.0.1", random.SystemRandom())
    subprocess.run([sys.executable, "-m", *_here(DRAWING, DRAWING["command"], tmp_path)], check=True, timeout=60)
    command = _here(REDIS, REDIS["command"], tmp_path)
    command += ["--tls-port", str(number), "--dir", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            deadline_s = time.monotonic() + _READY_S
            while _health(number, tmp_path).returncode != 0:
                assert server.poll() is None, "redis-server ended at once"
                assert time.monotonic() < deadline_s, "redis-server does not answer"
            yield number
        finally:
            server.kill()


@pytest.fixture
def resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name `redis` is this machine, as on compose's network."""
    ask = socket.getaddrinfo

    def answer(host: Any, *args: Any, **options: Any) -> Any:
        return ask("127.0.0.1" if host == "redis" else host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", answer)


def _volumes(service: Object) -> dict[str, str]:
    """Mount path of each named volume."""
    found = dict[str, str]()
    for each in service.get("volumes", []):
        name, _, place = each.rpartition(":ro")[0].rpartition(":") if each.endswith(":ro") else each.rpartition(":")
        if not name.startswith("${"):
            found[name] = place
    return found


def _here(service: Object, words: list[str], directory: Path) -> list[str]:
    """Words with volumes as directories, and with the password."""
    words = filled(words, PASSWORD)
    for name, place in _volumes(service).items():
        words = [word.replace(place, str(directory / name)) for word in words]
    return words


def _health(number: int, directory: Path) -> "subprocess.CompletedProcess[str]":
    _, program, *asked = _here(REDIS, REDIS["healthcheck"]["test"], directory)
    environment = {**os.environ, "REDISCLI_AUTH": PASSWORD}
    command = [program, "-p", str(number), *asked]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_READY_S, check=False)


def _ask(service: str, number: int, directory: Path, *command: str, host: str = "redis") -> Any:
    """The answer to the product's client, by the URL that a service is given."""
    (url,) = _here(SERVICES[service], [SERVICES[service]["environment"]["TANDEM_REDIS"]], directory)

    async def ask() -> Any:
        client = connect(url.replace("@redis:6379/", f"@{host}:{number}/"))
        try:
            async with answered_within(_READY_S):
                return await client.execute_command(*command)  # type: ignore[no-untyped-call]
        finally:
            await client.aclose()

    return asyncio.run(ask())


@pytest.mark.parametrize("service", ["router", "prefill", "decode", "gateway"])
@pytest.mark.usefixtures("resolved")
def test_a_process_reaches_it_by_its_url(service: str, port: int, tmp_path: Path) -> None:
    assert _ask(service, port, tmp_path, "PING")
    with pytest.raises(NoPermissionError):
        _ask(service, port, tmp_path, "CONFIG", "GET", "*")


@pytest.mark.usefixtures("resolved")
def test_a_redis_of_another_authority_is_not_told_the_password(port: int, tmp_path: Path) -> None:
    create_certificate("redis", tmp_path / "other", tmp_path / "redis-ca")
    with pytest.raises(RedisConnectionError, match="certificate verify failed"):
        _ask("gateway", port, tmp_path, "PING")


def test_a_redis_of_another_name_is_not_told_the_password(port: int, tmp_path: Path) -> None:
    with pytest.raises(RedisConnectionError, match="certificate verify failed"):
        _ask("router", port, tmp_path, "PING", host="127.0.0.1")


def test_it_answers_nobody_in_plain_text(port: int) -> None:
    with Redis(port=port, username="cluster", password=PASSWORD) as client, pytest.raises(RedisConnectionError):
        client.ping()


def test_its_health_is_asked_with_the_password(port: int, tmp_path: Path) -> None:
    assert _health(port, tmp_path).stdout.strip() == "PONG"


def test_the_key_is_mounted_where_it_is_needed_alone() -> None:
    mounted = {name: _volumes(service) for name, service in SERVICES.items()}
    assert [name for name, volumes in mounted.items() if "redis-tls" in volumes] == ["redis-certificate", "redis"]
    assert "redis-ca" not in mounted["redis"]
    assert all("redis-ca" in mounted[name] for name in ("router", "prefill", "decode", "gateway"))
    for name, service in SERVICES.items():
        if name != "redis-certificate":
            assert all(each.endswith(":ro") for each in service["volumes"])
    assert REDIS["depends_on"] == {"redis-certificate": {"condition": "service_completed_successfully"}}
