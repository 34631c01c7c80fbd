"""Nonsense sent to a port, or as a peer, harms nobody."""

import asyncio
import random
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress

import grpc
import psutil
import pytest

from tandem.rpc.messages import WorkerAddress
from tandem.rpc.methods import ROUTER_SERVICE, WORKER_SERVICE
from tandem.rpc.protocols import PROTOCOL_VERSION
from tests.faults.matrix import Matrix, Row
from tests.faults.scene import LEASE_TTL_S, Scene, generate_with
from tests.faults.states import State, staged
from tests.faults.streams import PATIENCE_S, Asked, Known

FREE_S = LEASE_TTL_S + 0.5

Method = grpc.aio.UnaryStreamMultiCallable[bytes, bytes]
Nonsense = Callable[[], Awaitable[tuple[str, Callable[[], Awaitable[None]]]]]


async def random_bytes() -> tuple[str, Callable[[], Awaitable[None]]]:
    """A server that answers anything with noise."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            writer.write(random.Random(0).randbytes(1 << 16))
            await writer.drain()
            while await reader.read(1 << 16):
                pass
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)

    async def stop() -> None:
        server.close()

    return f"127.0.0.1:{server.sockets[0].getsockname()[1]}", stop


async def random_messages() -> tuple[str, Callable[[], Awaitable[None]]]:
    """A gRPC server that answers every method with noise."""

    class Handler(grpc.GenericRpcHandler):
        def service(self, _: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[bytes, bytes]":
            return grpc.unary_stream_rpc_method_handler(noise)

    async def noise(_: bytes, __: object) -> AsyncIterator[bytes]:
        yield random.Random(0).randbytes(1 << 10)

    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Handler(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()

    async def stop() -> None:
        await server.stop(0.0)

    return f"127.0.0.1:{port}", stop


@pytest.mark.parametrize("kind", [random_bytes, random_messages])
def test_a_peer_that_talks_nonsense_costs_a_recomputation(
    small_scene: Scene, small_known: Mapping[float, Known], matrix: Matrix, kind: Nonsense
) -> None:
    async def story() -> list[int]:
        address, stop = await kind()
        try:
            return await generate_with(small_scene, small_known[0.0].asked, WorkerAddress("babbler", address))
        finally:
            await stop()

    began_s = time.monotonic()
    assert asyncio.run(story()) == small_known[0.0].token_ids
    took_s = time.monotonic() - began_s
    free_s = small_scene.seconds_until_free(small_scene.workers(), time.monotonic(), FREE_S)
    matrix.append(
        Row("a peer", "hand-off", f"sends {kind.__name__}", "exact, computed by decode", took_s, None, free_s)
    )


def test_noise_at_every_door_harms_nobody(
    small_scene: Scene, small_known: Mapping[float, Known], short: Asked, matrix: Matrix
) -> None:
    """Noise to every port that any process listens at, and noise as a message to every method."""
    told = small_known[0.8]
    source = random.Random(0)
    pids = {name: process.pid for name, process in small_scene.cluster.processes.items()}
    with staged(small_scene, State.DECODING, told.asked) as target:
        since_s = time.monotonic()
        doors = [door for pid in pids.values() for door in listening(pid)]
        assert len(doors) >= 2 * len(pids) - 1
        for door in doors:
            shout(door, source)
        asyncio.run(call_everything(small_scene, source))
        target.answer.wait()
        assert (target.answer.error, target.answer.token_ids) == (None, told.token_ids)
    fresh = small_scene.finished(short)
    assert fresh.error is None, fresh.error
    assert fresh.took_s < 1.0
    free_s = small_scene.seconds_until_free(small_scene.workers(), time.monotonic(), FREE_S)
    assert all(process.returncode is None for process in small_scene.cluster.processes.values())
    silence_s = target.answer.longest_silence_s(since_s)
    matrix.append(Row("all", State.DECODING, "noise at every port", "exact", silence_s, fresh.took_s, free_s))


def listening(pid: int) -> list[tuple[str, int]]:
    """Hosts and ports at which a process accepts TCP connections."""
    found = psutil.Process(pid).net_connections(kind="tcp")
    heard = {(each.laddr.ip, each.laddr.port) for each in found if each.status == psutil.CONN_LISTEN}
    return sorted((_ANY.get(ip, ip), port) for ip, port in heard)


def shout(door: tuple[str, int], source: random.Random) -> None:
    """Several kinds of noise, the connection left in the middle of it."""
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    for noise in (b"", source.randbytes(7), source.randbytes(1 << 16), preface + source.randbytes(4096)):
        with socket.create_connection(door, timeout=5.0) as connection, suppress(OSError):
            connection.sendall(noise)


async def call_everything(scene: Scene, source: random.Random) -> None:
    """Every method of workers and routers, with messages that are none."""
    workers = [row["address"] for row in scene.cluster.workers() if row["role"] in ("prefill", "decode")]
    routers = [row["address"] for row in scene.cluster.workers() if row["role"] == "router"]
    for service, listed in ((WORKER_SERVICE, workers), (ROUTER_SERVICE, routers)):
        for address in listed:
            async with grpc.aio.insecure_channel(address) as channel:
                for name in METHODS[service]:
                    for size in (0, 1, 300):
                        method: Method = channel.unary_stream(f"/{service}/{name}")
                        call = method(source.randbytes(size), timeout=PATIENCE_S, metadata=VERSION)
                        with suppress(grpc.aio.AioRpcError):
                            async for _ in call:
                                break
                        call.cancel()


_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}
VERSION = (("tandem-protocol", str(PROTOCOL_VERSION)),)
METHODS = {
    WORKER_SERVICE: (
        "Status",
        "Watch",
        "Serve",
        "Generate",
        "Prefill",
        "Greet",
        "Lease",
        "Renew",
        "Confirm",
        "Release",
        "Nothing",
    ),
    ROUTER_SERVICE: ("Pair", "Settle", "Models", "Workers", "Register", "Unregister", "Publish", "Replace", "Nothing"),
}
