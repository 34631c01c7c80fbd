"""A client that ends its sending gets its answer; one that left, or does not read, frees its worker."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from tests.helpers.fake_backend import JSON_HEAD, MODEL, FakeCluster, eventually, running_cluster, text_of

COMPLETION = {"model": MODEL, "prompt": "abc", "seed": 1, "max_tokens": 6}
NUM_CHOICES = 16
NUM_TOKENS = 300  # with as many answers at once, more than small buffers of a connection hold

Story = Callable[[FakeCluster], Awaitable[None]]


def run(directory: Path, story: Story, loop: str) -> None:
    """On the loop that a gateway has where it is installed, and on the other."""

    async def whole() -> None:
        async with running_cluster(directory, num_workers=1) as cluster:
            await story(cluster)

    factory = None if loop == "asyncio" else pytest.importorskip("uvloop", reason="uvloop is not installed").Loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(whole())


LOOPS = pytest.mark.parametrize("loop", ["asyncio", "uvloop"])


def request_of(body: dict[str, Any], version: str = "1.1") -> bytes:
    data = orjson.dumps(body)
    return f"POST /v1/completions HTTP/{version}\r\n{JSON_HEAD}content-length: {len(data)}\r\n\r\n".encode() + data


async def connect(cluster: FakeCluster) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    url = httpx.URL(cluster.url)
    return await asyncio.open_connection(url.host, url.port)


@LOOPS
@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("hold_at", [0, 3])
def test_a_client_that_ends_its_sending_gets_its_answer(
    tmp_path: Path, loop: str, is_stream: bool, hold_at: int
) -> None:
    """Regression: it got nothing. It is probed while it waits, without harm to what it reads."""

    async def story(cluster: FakeCluster) -> None:
        (worker,) = cluster.workers
        worker.hold_at = hold_at
        reader, writer = await connect(cluster)
        writer.write(request_of(COMPLETION | {"stream": is_stream}))
        await worker.reached.wait()
        if is_stream and hold_at:
            begun = await reader.readuntil(b'"choices"')
        else:
            begun = b""
        writer.write_eof()
        if not begun:
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        elif is_stream:
            begun += await reader.readuntil(b": ping\n\n")
        worker.go.set()
        said = begun + await reader.read()
        head, _, rest = said[said.index(b"HTTP/1.1 200") :].partition(b"\r\n\r\n")
        assert begun or b"connection: close" in head
        if is_stream:
            frames = [line[6:] for line in rest.split(b"\n") if line.startswith(b"data: {")]
            assert "".join(orjson.loads(line)["choices"][0]["text"] for line in frames) == text_of(1, 6)
            assert rest.endswith(b"0\r\n\r\n")
        else:
            assert orjson.loads(rest)["choices"][0]["text"] == text_of(1, 6)
        writer.close()

    run(tmp_path, story, loop)


@LOOPS
@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("hold_at", [0, 3])
def test_a_client_that_left_is_noticed_though_nothing_is_said(
    tmp_path: Path, loop: str, is_stream: bool, hold_at: int
) -> None:
    """Its FIN is that of a client that ended its sending; what is written to it tells them apart."""

    async def story(cluster: FakeCluster) -> None:
        (worker,) = cluster.workers
        worker.hold_at = hold_at
        reader, writer = await connect(cluster)
        writer.write(request_of(COMPLETION | {"stream": is_stream}))
        await worker.reached.wait()
        if is_stream and hold_at:
            await reader.readuntil(b"\n\n")
        writer.close()
        await writer.wait_closed()
        await eventually(lambda: worker.num_open == 0)

    run(tmp_path, story, loop)


@LOOPS
@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("hold_at", [0, 3])
def test_a_client_that_left_with_several_requests_on_their_way_is_noticed(
    tmp_path: Path, loop: str, is_stream: bool, hold_at: int
) -> None:
    """Regression: the connection knew the last of them only, so the one that was served went on to its end."""

    async def story(cluster: FakeCluster) -> None:
        (worker,) = cluster.workers
        worker.hold_at = hold_at
        reader, writer = await connect(cluster)
        writer.write(request_of(COMPLETION | {"stream": is_stream}) * 3)
        await worker.reached.wait()
        if is_stream and hold_at:
            await reader.readuntil(b"\n\n")
        writer.close()
        await writer.wait_closed()
        await eventually(lambda: worker.num_open == 0)

    run(tmp_path, story, loop)


@LOOPS
@pytest.mark.parametrize("is_stream", [False, True])
def test_the_first_of_several_requests_is_probed_without_harm(tmp_path: Path, loop: str, is_stream: bool) -> None:
    async def story(cluster: FakeCluster) -> None:
        (worker,) = cluster.workers
        worker.hold_at = 0
        reader, writer = await connect(cluster)
        writer.write(request_of(COMPLETION | {"stream": is_stream}) * 2)
        await worker.reached.wait()
        writer.write_eof()
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        worker.go.set()
        said = await reader.read()
        assert said.count(b"HTTP/1.1 200") == 2
        assert said.count(b"data: [DONE]") == 2 * is_stream
        writer.close()

    run(tmp_path, story, loop)


@LOOPS
def test_requests_on_their_way_are_all_answered(tmp_path: Path, loop: str) -> None:
    async def story(cluster: FakeCluster) -> None:
        reader, writer = await connect(cluster)
        writer.write(request_of(COMPLETION) * 3)
        writer.write_eof()
        assert (await reader.read()).count(b"HTTP/1.1 200") == 3
        writer.close()

    run(tmp_path, story, loop)


@LOOPS
@pytest.mark.parametrize("is_closed", [False, True])
def test_a_reader_that_stalled_and_leaves_frees_its_worker(tmp_path: Path, loop: str, is_closed: bool) -> None:
    """Regression: while its answer could not be written, the connection was closed only once it would have read it."""

    async def story(cluster: FakeCluster) -> None:
        (worker,) = cluster.workers
        worker.hold_at = NUM_TOKENS
        body = COMPLETION | {"stream": True, "n": NUM_CHOICES, "max_tokens": NUM_TOKENS + 1}
        url = httpx.URL(cluster.url)
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            running = asyncio.get_running_loop()
            await running.sock_connect(client, (url.host, url.port))
            connections: set[Any] = cluster.gateway._server.server_state.connections
            await eventually(lambda: len(connections) == 1)
            (own,) = connections
            own.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            await running.sock_sendall(client, request_of(body))
            await eventually(lambda: any(connection.flow.write_paused for connection in connections))
            await eventually(lambda: worker.num_open == NUM_CHOICES)
            if is_closed:
                client.close()
            else:
                client.shutdown(socket.SHUT_WR)
            await eventually(lambda: worker.num_open == 0, timeout_s=3.0)

    run(tmp_path, story, loop)


def test_http_1_0_gets_no_chunks(tmp_path: Path) -> None:
    """Regression: clients of it took the lines between chunks for the answer. Its body ends with the connection."""

    async def story(cluster: FakeCluster) -> None:
        for is_stream in (False, True):
            reader, writer = await connect(cluster)
            writer.write(request_of(COMPLETION | {"stream": is_stream}, "1.0"))
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            assert b"transfer-encoding" not in head
            assert (b"content-length" in head) is not is_stream
            if is_stream:
                assert body.startswith(b"data: {")
                assert body.endswith(b"data: [DONE]\n\n")
            else:
                assert orjson.loads(body)["choices"][0]["text"] == text_of(1, 6)
            writer.close()

    run(tmp_path, story, "asyncio")
