"""The line about a running cluster, from a gateway that asks for keys and from one that does not."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tandem.cli.cluster_status import ClusterStatus
from tandem.process.supervisor import Supervisor

METRICS = b"# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 3.0\n"
WORKERS = b"""{"workers": [
    {"role": "decode", "worker_id": "d1", "slowness": 15.7, "is_alive": true, "num_waiting": 2,
     "blocks": {"free": 5, "cached": 1, "used": 2}},
    {"role": "decode", "worker_id": "d2", "slowness": null, "is_alive": false, "num_waiting": 9,
     "blocks": {"used": 100}, "state": "ready", "age_s": 0.1},
    {"role": "decode", "worker_id": "d3", "slowness": null, "is_alive": false, "num_waiting": 3,
     "blocks": {"free": 0, "cached": 2, "used": 6}, "state": "draining", "age_s": 0.1}
]}"""


@asynccontextmanager
async def gateway(key: str | None) -> AsyncIterator[str]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        is_admin = key is None or f"Authorization: Bearer {key}\r\n" in head
        if "/metrics" in head:
            writer.write(b"HTTP/1.0 200 OK\r\n\r\n" + METRICS)
        elif is_admin:
            writer.write(b"HTTP/1.0 200 OK\r\n\r\n" + WORKERS)
        else:
            writer.write(b'HTTP/1.0 401 Unauthorized\r\n\r\n{"error": {}}')
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize(
    ("key", "given", "expected"),
    [
        (None, None, "3 running, 5 waiting · KV decode 50 % · set aside as slow: d1 (16x)"),
        ("sk-admin", "sk-admin", "3 running, 5 waiting · KV decode 50 % · set aside as slow: d1 (16x)"),
        ("sk-admin", None, "3 running · the workers are shown to an admin's key only: --admin-key"),
        ("sk-admin", "sk-other", "3 running · the workers are shown to an admin's key only: --admin-key"),
    ],
)
def test_the_line_says_what_the_key_may_see(key: str | None, given: str | None, expected: str) -> None:
    async def scenario() -> None:
        async with gateway(key) as url:
            status = ClusterStatus(url, Supervisor([], lambda *_: None, lambda *_: None), given)
            assert await status.changed_line() == f"0 of 0 processes ready · {expected}"

    asyncio.run(scenario())


def test_a_gateway_that_is_away_is_said_so() -> None:
    async def scenario() -> None:
        async with gateway(None) as url:
            pass
        line = await ClusterStatus(url, Supervisor([], lambda *_: None, lambda *_: None)).changed_line()
        assert line is not None
        assert "the gateway does not answer" in line

    asyncio.run(scenario())
