"""The edge of a server: who is let in, what becomes of errors, and what a hostile caller can do."""

import asyncio
import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import grpc
import pytest

from tandem.core.errors import (
    CapacityError,
    CheckpointError,
    ConfigurationError,
    CorruptCheckpointError,
    EngineStoppedError,
    IncompatiblePeerError,
    InvalidRequestError,
    LocalityUnavailableError,
    TandemError,
    TransportError,
    UnavailableError,
    UntrustedPeerError,
    WorkerLostError,
)
from tandem.rpc import methods
from tandem.rpc.client import WorkerClient
from tandem.rpc.credentials import Credentials
from tandem.rpc.methods import ROUTER_SERVICE, WORKER_SERVICE
from tandem.rpc.network import RpcServer
from tandem.rpc.permissions import ALLOWED
from tandem.rpc.server import serve_router, serve_worker
from tandem.rpc.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from tests.helpers.raw_calls import ended, header, opened
from tests.helpers.secret import AS_GATEWAY, AS_ROUTER, AS_WORKER
from tests.unit.rpc.handlers import Router, Worker, generate_call, run
from tests.unit.rpc.strategies import EVERY

ANY_PORT = "127.0.0.1:0"
GARBAGE = b"\xff\xff\xff"
ERRORS = [
    InvalidRequestError("temperature=-1 ☃\nsecond line"),
    ConfigurationError("a"),
    CheckpointError("b"),
    CorruptCheckpointError("c"),
    CapacityError("d", 2.5),
    CapacityError("d", 0.0),
    CapacityError("d"),
    EngineStoppedError("e"),
    UnavailableError("f", 1.25),
    WorkerLostError("g"),
    LocalityUnavailableError("h"),
    TransportError("i"),
    IncompatiblePeerError("j"),
    TandemError("k"),
    UntrustedPeerError("l"),
]


async def fails_with(server: RpcServer, path: str, data: bytes, credentials: Credentials) -> tuple[Any, str]:
    """The status and message with which a raw call ends."""
    async with grpc.aio.insecure_channel(server.address) as channel:
        session = await opened(channel, credentials)
        end = await ended(channel, path, data, header(session, path, b"" if path == methods.SERVE.path else data))
    return end.code, end.details


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_every_error_crosses_as_itself(error: TandemError) -> None:
    async def check() -> None:
        server = await serve_worker(Worker(raises=error), ANY_PORT, AS_WORKER)
        client = WorkerClient(server.address, AS_GATEWAY)
        for answer in (client.status(), anext(client.generate(generate_call()))):
            with pytest.raises(TandemError) as caught:
                await answer
            assert type(caught.value) is type(error)
            assert str(caught.value) == str(error)
            assert getattr(caught.value, "retry_after_s", None) == getattr(error, "retry_after_s", None)
        await client.close()
        await server.stop()

    run(check)


def test_a_bug_in_a_handler_is_logged_with_the_request_and_not_told(caplog: pytest.LogCaptureFixture) -> None:
    async def check() -> None:
        server = await serve_worker(Worker(raises=ZeroDivisionError("secret detail")), ANY_PORT, AS_WORKER)
        client = WorkerClient(server.address, AS_GATEWAY)
        with pytest.raises(WorkerLostError, match=r"INTERNAL.*ZeroDivisionError") as caught:
            await anext(client.generate(generate_call()))
        assert "secret detail" not in str(caught.value)
        assert server.address in str(caught.value)
        await client.close()
        await server.stop()

    with caplog.at_level(logging.ERROR):
        run(check)
    (record,) = [record for record in caplog.records if record.name.startswith("tandem.")]  # gRPC logs too
    assert "r1" in record.getMessage()
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], ZeroDivisionError)


def test_an_answer_that_cannot_be_sent_is_not_the_callers_fault(caplog: pytest.LogCaptureFixture) -> None:
    class Careless(Worker):
        async def renew(self, lease_ids: Sequence[str]) -> Sequence[str]:
            return ["\ud800"]

    async def check() -> None:
        server = await serve_worker(Careless(), ANY_PORT, AS_WORKER)
        client = WorkerClient(server.address, AS_WORKER)
        with pytest.raises(WorkerLostError, match="INTERNAL"):
            await client.renew([])
        await client.close()
        await server.stop()

    run(check)
    assert "cannot be sent" in caplog.text


def test_a_handler_that_was_cancelled_from_within_ends_the_call() -> None:
    async def check() -> None:
        server = await serve_worker(Worker(raises=asyncio.CancelledError()), ANY_PORT, AS_WORKER)
        client = WorkerClient(server.address, AS_GATEWAY)
        with pytest.raises(WorkerLostError, match="Status was cancelled by the process"):
            await client.status(timeout_s=2.0)
        with pytest.raises(WorkerLostError, match="Generate was cancelled by the process"):
            await anext(client.generate(generate_call(), timeout_s=2.0))
        await client.close()
        await server.stop()

    run(check)


@pytest.mark.parametrize("method", EVERY, ids=lambda method: method.name)
def test_garbage_is_refused_by_every_method(method: Any) -> None:
    async def check() -> None:
        worker, router = Worker(), Router()
        servers = {
            WORKER_SERVICE: await serve_worker(worker, ANY_PORT, AS_WORKER),
            ROUTER_SERVICE: await serve_router(router, ANY_PORT, AS_ROUTER),
        }
        (role, *_) = ALLOWED[method.path]
        code, details = await fails_with(servers[method.service], method.path, GARBAGE, replace(AS_GATEWAY, role=role))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert f"3 bytes are not a {method.name}Request" in details
        assert worker.calls == router.calls == []
        for server in servers.values():
            await server.stop()

    run(check)


def test_a_caller_of_protocol_1_is_told_which_are_spoken_and_the_log_is_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It sent its token and its version with every call; it reads the class of the error from the trailing metadata."""

    async def check() -> None:
        worker = Worker()
        server = await serve_worker(worker, ANY_PORT, AS_WORKER)
        async with grpc.aio.insecure_channel(server.address) as channel:
            for _ in range(3):
                end = await ended(channel, methods.STATUS.path, b"", (("tandem-protocol", "1"), ("tandem-token", "x")))
                assert end.code is grpc.StatusCode.UNAVAILABLE
                assert "the caller speaks protocol '1', this process 2 to 2; run releases" in end.details
        (told,) = (record.message for record in caplog.records if record.levelname == "ERROR")
        assert re.search("127.0.0.1:.* is refused until this is mended: the caller speaks protocol '1'", told)
        assert worker.calls == []
        await server.stop()

    run(check)


def test_who_is_refused_is_logged_once_a_minute_for_each_reason(caplog: pytest.LogCaptureFixture) -> None:
    """Regression: a client said "its log says why", and nothing was there."""

    async def check() -> None:
        server = await serve_worker(Worker(), ANY_PORT, AS_WORKER)
        stranger = WorkerClient(server.address, replace(AS_GATEWAY, secret=b"theirs"))
        router = WorkerClient(server.address, AS_ROUTER)
        for _ in range(3):
            for refused in (stranger.status(), router.renew([])):
                with pytest.raises(UntrustedPeerError):
                    await refused
        async with grpc.aio.insecure_channel(server.address) as channel:
            await ended(channel, methods.STATUS.path, b"", (("tandem-protocol", "long" * 1000),))
            await ended(channel, methods.STATUS.path, b"", (("tandem-proof", f"{'0' * 32}.1.x"),))
        told = [record.message for record in caplog.records if record.levelname == "ERROR"]
        reasons = [line.partition(" is refused until this is mended: ")[2] for line in told]
        assert reasons[:2] == [
            "the cluster secret differs",
            "a router may not call Renew; allowed: both, decode, prefill",
        ]
        (former,) = reasons[2:]
        assert former.startswith("the caller speaks protocol 'longlong")
        assert len(former) < 400
        assert all("127.0.0.1:" in line for line in told)
        for client in (stranger, router):
            await client.close()
        await server.stop()

    run(check)


def test_only_the_cluster_is_let_in() -> None:
    async def check() -> None:
        worker = Worker()
        server = await serve_worker(worker, ANY_PORT, AS_WORKER)
        stranger = WorkerClient(server.address, replace(AS_GATEWAY, secret=b"theirs"))
        for answer in (stranger.status(), anext(stranger.generate(generate_call()))):
            with pytest.raises(UntrustedPeerError, match=r"opens no session .* says why; .* same cluster secret"):
                await answer
        await stranger.close()
        async with grpc.aio.insecure_channel(server.address) as channel:
            for metadata in ((), (("tandem-proof", ""),), (("tandem-proof", "nonsense"),)):
                end = await ended(channel, methods.STATUS.path, b"", metadata)
                assert end.code is grpc.StatusCode.UNAUTHENTICATED
                assert "carries no proof" in end.details
        assert worker.calls == []
        client = WorkerClient(server.address, AS_GATEWAY)
        await client.status()
        await client.close()
        await server.stop()

    run(check)


def test_handlers_see_the_trace_of_their_own_call() -> None:
    async def check() -> None:
        worker = Worker()
        server = await serve_worker(worker, ANY_PORT, AS_WORKER)
        traces = iter(["00-a", "00-b"])
        traced = WorkerClient(server.address, AS_GATEWAY, metadata_source=lambda: [("traceparent", next(traces))])
        plain = WorkerClient(server.address, AS_GATEWAY)
        await traced.status()
        await plain.status()
        await anext(stream := traced.generate(generate_call()))
        await stream.aclose()
        assert worker.traceparents == ["00-a", None, "00-b"]
        await traced.close()
        await plain.close()
        await server.stop()

    run(check)


def test_a_taken_port_is_named() -> None:
    async def check() -> None:
        server = await serve_worker(Worker(), ANY_PORT, AS_WORKER)
        assert server.address == f"127.0.0.1:{server.port}"
        with pytest.raises(ConfigurationError, match=f"cannot listen on {server.address}"):
            await serve_worker(Worker(), server.address, AS_WORKER)
        await server.stop()

    run(check)


def test_a_stop_with_grace_lets_calls_finish() -> None:
    class Slow(Worker):
        def __init__(self) -> None:
            super().__init__()
            self.go_on = asyncio.Event()

        async def renew(self, lease_ids: Sequence[str]) -> Sequence[str]:
            self.started.set()
            await self.go_on.wait()
            return lease_ids

    async def check() -> None:
        worker = Slow()
        server = await serve_worker(worker, ANY_PORT, AS_WORKER)
        client = WorkerClient(server.address, AS_WORKER)
        asking = asyncio.ensure_future(client.renew(["a"]))
        await worker.started.wait()
        stopping = asyncio.ensure_future(server.stop(10.0))
        with pytest.raises(WorkerLostError):
            await client.release(("a",))
        worker.go_on.set()
        assert await asking == ("a",)
        await stopping
        await client.close()

    run(check)


def test_a_caller_with_a_generated_stub_is_understood() -> None:
    """Someone else's client, made from the .proto files, which also say what a proof is."""

    async def check() -> None:
        server = await serve_worker(Worker(), ANY_PORT, AS_WORKER)
        async with grpc.aio.insecure_channel(server.address) as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]
            session = await opened(channel, AS_GATEWAY)
            asked = worker_pb2.StatusRequest()
            proof = header(session, methods.STATUS.path, asked.SerializeToString())
            answer = await stub.Status(asked, metadata=proof)
            assert answer.status.worker.worker_id == "d0"
            call = worker_pb2.GenerateRequest(
                request_id="r",
                prompt_token_ids=b"\x01\x00\x00\x00",
                params=worker_pb2.SamplingParams(max_tokens=1),
                scope=common_pb2.CacheScope(),
            )
            proof = header(session, methods.GENERATE.path, call.SerializeToString())
            outputs = [update.output async for update in stub.Generate(call, metadata=proof)]
            assert [list(output.token_ids) for output in outputs] == [[0]]
        await server.stop()

    run(check)
