"""Clients against real servers on this machine: answers, errors, cancellation, deadlines and loss."""

import asyncio
import signal
import subprocess
import sys
import time
from array import array
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import grpc
import pytest

from tandem.core.errors import InvalidRequestError, UntrustedPeerError, WorkerLostError
from tandem.core.events import BlockRemoved, BlockStored
from tandem.core.scope import UNSCOPED
from tandem.locality.base import PublishResult
from tandem.routing.settlement import Settlement
from tandem.rpc import encryption, methods, session_opener
from tandem.rpc.channel import CLIENT_OPTIONS, KEEPALIVE_S
from tandem.rpc.client import ClientPool, RouterClient, WorkerClient
from tandem.rpc.credentials import WORKER_ROLES
from tandem.rpc.grpc_connection import GrpcConnection
from tandem.rpc.messages import (
    ConfirmAnswer,
    ConfirmCall,
    Decision,
    Greeting,
    LeaseCall,
    PairCall,
    PairingAnswer,
    PrefillCall,
    PrefillUpdate,
    ProcessInfo,
    Registration,
    WorkerListing,
    WorkerRecord,
    WorkerStatus,
)
from tandem.rpc.server import serve_router, serve_worker
from tandem.rpc.session import Expected
from tests.helpers.raw_calls import opener
from tests.helpers.secret import AS_GATEWAY, AS_OPERATOR, AS_ROUTER, AS_WORKER
from tests.helpers.wire_tap import tapping
from tests.unit.rpc.handlers import HERE, LEASE, MODEL, STATUS, Router, Worker, generate_call, run
from tests.unit.rpc.processes import MORTAL_ROUTER, MORTAL_WORKER, running

ANY_PORT = "127.0.0.1:0"
connect = partial(WorkerClient, credentials=AS_GATEWAY)


def test_every_method_of_a_worker_answers() -> None:
    async def check() -> None:
        worker = Worker()
        server = await serve_worker(worker, ANY_PORT, AS_WORKER)
        client, peer, router, tool = (
            WorkerClient(server.address, who) for who in (AS_GATEWAY, AS_WORKER, AS_ROUTER, AS_OPERATOR)
        )
        greeting = Greeting(
            worker=HERE, epoch=1, protocol_version=1, compatibility={}, site={"a": True}, cards={}, num_blocks=2
        )
        lease_call = LeaseCall(reader=HERE, lease_id="l", block_hashes=(bytes(32),))
        prefill_call = PrefillCall(
            request_id="r",
            reader=HERE,
            prompt_token_ids=array("I", (0,)),
            params=generate_call(seed=0).params,
            scope=UNSCOPED,
        )
        assert await client.status() == STATUS
        watch = router.watch(0.25)
        assert await anext(watch) == STATUS
        await watch.aclose()
        await tool.drain()
        assert [update.output.token_ids async for update in client.generate(generate_call())] == [(0,), (1,), (2,)]
        assert [update async for update in peer.prefill(prefill_call)] == [
            PrefillUpdate(lease=LEASE),
            PrefillUpdate(num_cached_tokens=0),
        ]
        assert await peer.greet(greeting) == greeting
        assert await peer.lease(lease_call) == LEASE
        assert await peer.renew(["a", "b"]) == ("a",)
        assert await peer.confirm(ConfirmCall(lease_id="l", checksum_block_ids=(7,))) == ConfirmAnswer(True, (7,))
        await peer.release(("a",))
        assert worker.calls == [
            ("status",),
            ("watch", 0.25),
            ("drain",),
            ("generate", generate_call()),
            ("prefill", prefill_call),
            ("greet", greeting),
            ("lease", lease_call),
            ("renew", ("a", "b")),
            ("confirm", ConfirmCall(lease_id="l", checksum_block_ids=(7,))),
            ("release", ("a",)),
        ]
        for each in (client, peer, router, tool):
            await each.close()
        await server.stop()

    run(check)


def test_every_method_of_a_router_answers() -> None:
    async def check() -> None:
        router = Router()
        server = await serve_router(router, ANY_PORT, AS_ROUTER)
        client, worker = RouterClient(server.address, AS_GATEWAY), RouterClient(server.address, AS_WORKER)
        call = PairCall(
            request_id="r", model="m", token_ids=array("I", [0]), num_expected_output=1, session_id="", scope=UNSCOPED
        )
        record = WorkerRecord(HERE, "decode", "m", "")
        events = (BlockStored(bytes(32), None, 0), BlockRemoved(b"a" * 32, 1))
        assert await client.pair(call) == PairingAnswer(decode=HERE, predicted_ms={"ttft": 0.0})
        await client.settle(Settlement(request_id="r", queue_ms=0.0))
        assert await client.describe() == ProcessInfo(pid=7, incarnation="i", lifecycle="ready")
        assert await client.models() == (MODEL,)
        assert await client.workers() == (WorkerListing(status=STATUS, age_s=0.5, is_alive=True),)
        assert await client.decisions(2) == (Decision(request_id="r", age_s=0.5, policy="first"),) * 2
        with pytest.raises(InvalidRequestError, match="num_latest=0"):
            await client.decisions(0)
        assert await worker.register(Registration(record)) == (record, record)
        assert await worker.register(Registration(record, without_records=True)) == ()
        await worker.unregister(record)
        assert await worker.publish("d0", 3, events, 4) is PublishResult.RESYNC
        assert await worker.replace("d0", 3, [bytes(32)], 4) is PublishResult.STALE
        assert router.calls == [
            call,
            Settlement(request_id="r", queue_ms=0.0),
            record,
            ("d0", 3, events, 4),
            ("d0", 3, (bytes(32),), 4),
        ]
        await client.close()
        await worker.close()
        await server.stop()

    run(check)


@pytest.mark.parametrize("num_before_silence", [0, 2])
def test_a_stream_that_is_cancelled_here_is_cancelled_there(num_before_silence: int) -> None:
    async def check() -> None:
        worker = Worker(num_before_silence=num_before_silence)
        server = await serve_worker(worker, ANY_PORT, AS_WORKER)
        client = WorkerClient(server.address, AS_GATEWAY)

        async def consume() -> None:
            async for _ in client.generate(generate_call()):
                pass

        task = asyncio.create_task(consume())
        await worker.started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await worker.cancelled.wait()
        assert client.is_idle
        await client.close()
        await server.stop()

    run(check)


def test_a_stream_that_is_closed_here_is_cancelled_there() -> None:
    async def check() -> None:
        worker = Worker(num_before_silence=1)
        server = await serve_worker(worker, ANY_PORT, AS_WORKER)
        client = WorkerClient(server.address, AS_GATEWAY)
        stream = client.generate(generate_call())
        await anext(stream)
        await worker.started.wait()
        assert not client.is_idle
        await stream.aclose()
        await worker.cancelled.wait()
        await client.close()
        await server.stop()

    run(check)


def test_a_deadline_ends_both_sides() -> None:
    async def check() -> None:
        worker = Worker(num_before_silence=0)
        server = await serve_worker(worker, ANY_PORT, AS_WORKER)
        client, peer = WorkerClient(server.address, AS_GATEWAY), WorkerClient(server.address, AS_WORKER)
        await peer.release(("first",))  # NOTE: connecting must not use up the deadline, or the worker never hears of it
        with pytest.raises(WorkerLostError, match=rf"Release at {server.address} did not answer within 0.5 s"):
            await peer.release(("never",), timeout_s=0.5)
        await worker.cancelled.wait()
        with pytest.raises(WorkerLostError, match=r"did not answer within 0.1 s"):
            await anext(client.generate(generate_call(), timeout_s=0.1))
        await client.close()
        await peer.close()
        await server.stop()

    run(check)


def test_a_worker_killed_mid_stream_is_lost_at_once() -> None:
    async def check() -> None:
        with subprocess.Popen([sys.executable, "-c", MORTAL_WORKER], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            port = int(await asyncio.to_thread(process.stdout.readline))
            client = WorkerClient(f"127.0.0.1:{port}", AS_GATEWAY)
            stream = client.generate(generate_call())
            await anext(stream)
            begin = time.perf_counter()
            process.send_signal(signal.SIGKILL)
            with pytest.raises(WorkerLostError, match=f"127.0.0.1:{port}"):
                await anext(stream)
            with pytest.raises(WorkerLostError, match=f"127.0.0.1:{port}"):
                await client.status()
            assert time.perf_counter() - begin < KEEPALIVE_S / 2
            await client.close()

    run(check)


def test_a_peer_that_hangs_is_noticed_by_its_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC waited 60 s for the answer to a ping, whatever the timeout of keepalives said."""

    def quicker(name: str, value: int) -> int:
        return value // 10 if "keepalive" in name or "ping_timeout" in name else value

    monkeypatch.setattr(encryption, "CLIENT_OPTIONS", [(name, quicker(name, value)) for name, value in CLIENT_OPTIONS])

    async def check() -> None:
        async with running(MORTAL_WORKER) as (process, address):
            client = WorkerClient(address, AS_GATEWAY)
            await client.status()
            process.send_signal(signal.SIGSTOP)
            with pytest.raises(WorkerLostError, match="was lost"):
                await client.status(timeout_s=None)
            await client.close()

    run(check)


def test_a_router_that_hangs_is_left_for_another_at_the_same_address() -> None:
    """The connection to it was kept, so each question waited there until its time was up."""

    async def check() -> None:
        server = await serve_router(Router(), ANY_PORT, AS_ROUTER)
        async with running(MORTAL_ROUTER) as (process, address):
            client = RouterClient(f"ipv4:{address},{server.address}", replace(AS_GATEWAY, is_insecure=True))
            await client.models()
            process.send_signal(signal.SIGSTOP)
            with pytest.raises(WorkerLostError, match=r"did not answer within 0.2 s"):
                await client.models(timeout_s=0.2)
            assert await client.models(timeout_s=8) == (MODEL,)
            await client.close()
        await server.stop()

    run(check)


def test_a_connection_that_died_without_a_word_is_left_for_a_new_one() -> None:
    """Regression: a worker that answered on every new connection counted as lost until a keepalive had failed."""

    async def check() -> None:
        server = await serve_worker(Worker(num_before_silence=1), ANY_PORT, AS_WORKER)
        async with tapping(server.address) as tap:
            client = WorkerClient(tap.address, AS_GATEWAY)
            running = client.generate(generate_call())
            await anext(running)
            tap.hold()
            begin = time.perf_counter()
            with pytest.raises(WorkerLostError, match=r"did not answer within 0.2 s"):
                await client.status(timeout_s=0.2)
            assert await client.status(timeout_s=4.0) == STATUS
            assert time.perf_counter() - begin < KEEPALIVE_S / 2
            assert len(tap.sent) == 2
            await running.aclose()
            tap.release()
            await client.close()
        await server.stop()

    run(check)


def test_a_handshake_that_is_not_answered_is_made_anew_on_another_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_opener, "HANDSHAKE_TIMEOUT_S", 0.2)

    async def check() -> None:
        has_asked = asyncio.Event()

        class Once(grpc.GenericRpcHandler):
            """Leaves the first handshake unanswered."""

            def service(self, handler_call_details: Any) -> "grpc.RpcMethodHandler[bytes, bytes] | None":
                if has_asked.is_set():
                    return opener(lambda: AS_WORKER)
                has_asked.set()
                return grpc.unary_unary_rpc_method_handler(_never)

        server = grpc.aio.server()
        server.add_generic_rpc_handlers((Once(),))
        port = server.add_insecure_port(ANY_PORT)
        await server.start()
        async with tapping(f"127.0.0.1:{port}") as tap:
            link = GrpcConnection(tap.address, AS_GATEWAY, Expected(WORKER_ROLES), None)
            with pytest.raises(WorkerLostError, match=r"opened no session within 0.2 s"):
                await link.require(methods.STATUS, "")
            await link.require(methods.STATUS, "")
            assert len(tap.sent) == 2
            await link.close()
        await server.stop(None)

    run(check)


async def _never(data: bytes, context: object) -> bytes:
    return await asyncio.Future()


def test_a_connection_that_is_accepted_and_closed_is_a_worker_that_was_lost() -> None:
    """Regression: so does a proxy whose worker is away, and a process that is ending; it was told as a wrong secret."""

    async def check() -> None:
        async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(1)
            writer.close()

        server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
        client = WorkerClient(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", AS_GATEWAY)
        with pytest.raises(WorkerLostError, match=r"was lost|closed the connection while it was made"):
            await client.status()
        await client.close()
        server.close()

    run(check)


class SlowRouter(Router):
    """Answers `describe` when told to, and `decisions` never."""

    def __init__(self) -> None:
        super().__init__()
        self.is_asked = asyncio.Event()
        self.may_answer = asyncio.Event()

    async def describe(self) -> ProcessInfo:
        self.is_asked.set()
        await self.may_answer.wait()
        return await super().describe()

    async def decisions(self, num_latest: int) -> Sequence[Decision]:
        await asyncio.Event().wait()
        return []


def test_a_connection_that_is_left_still_brings_the_answers_asked_for_there() -> None:
    async def check() -> None:
        router = SlowRouter()
        server = await serve_router(router, ANY_PORT, AS_ROUTER)
        client = RouterClient(server.address, AS_GATEWAY)
        asking = asyncio.create_task(client.describe())
        await router.is_asked.wait()
        with pytest.raises(WorkerLostError, match="did not answer"):
            await client.decisions(1, timeout_s=0.1)
        assert await client.models() == (MODEL,)
        router.may_answer.set()
        assert (await asking).pid == 7
        await client.close()
        await server.stop()

    run(check)


def test_a_client_finds_a_worker_that_is_back() -> None:
    async def check() -> None:
        server = await serve_worker(Worker(), ANY_PORT, AS_WORKER)
        client = WorkerClient(server.address, AS_GATEWAY)
        await client.status()
        await server.stop()
        with pytest.raises(WorkerLostError):
            await client.status()
        server = await serve_worker(Worker(), server.address, AS_WORKER)
        while True:
            try:
                assert await client.status() == STATUS
                break
            except WorkerLostError:
                await asyncio.sleep(0.02)  # between tries, as a caller would
        await client.close()
        await server.stop()

    run(check)


def test_a_server_that_stops_loses_its_streams() -> None:
    async def check() -> None:
        worker = Worker(num_before_silence=1)
        server = await serve_worker(worker, ANY_PORT, AS_WORKER)
        client = WorkerClient(server.address, AS_GATEWAY)
        stream = client.generate(generate_call())
        await anext(stream)
        await server.stop()
        with pytest.raises(WorkerLostError):
            await anext(stream)
        await worker.cancelled.wait()
        await client.close()

    run(check)


def test_closing_a_client_fails_its_calls_but_cancels_nobody() -> None:
    class Silent(Worker):
        async def status(self) -> WorkerStatus:
            return await asyncio.Future()

    async def check() -> None:
        worker = Silent(num_before_silence=1)
        server = await serve_worker(worker, ANY_PORT, AS_WORKER)
        client = WorkerClient(server.address, AS_GATEWAY)
        stream = client.generate(generate_call())
        await anext(stream)
        following = asyncio.ensure_future(anext(stream))
        asking = asyncio.ensure_future(client.status())
        await worker.started.wait()
        await client.close()
        for waiting in (following, asking):
            with pytest.raises(WorkerLostError, match="closed the connection"):
                await waiting
        with pytest.raises(WorkerLostError, match="closed the connection"):
            await client.status()
        await server.stop()

    run(check)


def test_what_cannot_be_sent_is_the_callers_fault() -> None:
    async def check() -> None:
        client = WorkerClient("127.0.0.1:1", AS_GATEWAY)
        with pytest.raises(InvalidRequestError, match="surrogates not allowed"):
            await client.release(["\ud800"])
        with pytest.raises(InvalidRequestError, match=r"GenerateRequest.prompt_token_ids=\(-1,\) cannot be sent"):
            await anext(client.generate(generate_call(prompt=(-1,))))
        await client.close()

    run(check)


def test_a_router_is_not_a_worker() -> None:
    async def check() -> None:
        server = await serve_router(Router(), ANY_PORT, AS_ROUTER)
        client = WorkerClient(server.address, AS_GATEWAY)
        with pytest.raises(UntrustedPeerError, match=r"is a router; a both or decode or prefill was expected"):
            await client.status()
        await client.close()
        await server.stop()

    run(check)


def test_nonsense_in_an_answer_is_a_lost_worker() -> None:
    async def nonsense(data: bytes, context: object) -> bytes:
        return b"\xff\xff\xff"

    async def check() -> None:
        server = grpc.aio.server()
        opening = {"Open": opener(lambda: AS_WORKER)}
        session = grpc.method_handlers_generic_handler(methods.SESSION_SERVICE, opening)
        handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(nonsense)
        service = grpc.method_handlers_generic_handler("tandem.rpc.v1.Worker", {"Status": handler})
        server.add_generic_rpc_handlers((service, session))
        port = server.add_insecure_port(ANY_PORT)
        await server.start()
        client = WorkerClient(f"127.0.0.1:{port}", AS_GATEWAY)
        with pytest.raises(WorkerLostError, match=f"127.0.0.1:{port} answered nonsense"):
            await client.status()
        await client.close()
        await server.stop(None)

    run(check)


def test_a_long_prompt_crosses_quickly() -> None:
    async def check() -> None:
        worker = Worker()
        server = await serve_worker(worker, ANY_PORT, AS_WORKER)
        client = WorkerClient(server.address, AS_GATEWAY)
        call = generate_call(num_tokens=1, prompt=array("I", range(126_000)))
        begin = time.perf_counter()
        async for _ in client.generate(call):
            pass
        assert time.perf_counter() - begin < 5.0
        assert worker.calls == [("generate", call)]
        await client.close()
        await server.stop()

    run(check)


def test_a_pool_keeps_one_client_for_each_address() -> None:
    async def check() -> None:
        pool = ClientPool(connect)
        client = pool.get("127.0.0.1:1")
        assert pool.get("127.0.0.1:1") is client
        assert pool.get("127.0.0.1:2") is not client
        await pool.close()
        with pytest.raises(WorkerLostError, match="closed the connection"):
            await client.status()

    run(check)


def test_a_full_pool_drops_the_idle_client_that_was_not_asked_for_longest() -> None:
    async def check() -> None:
        worker = Worker(num_before_silence=1)
        server = await serve_worker(worker, ANY_PORT, AS_WORKER)
        pool = ClientPool(connect, max_clients=2)
        busy = pool.get(server.address)
        stream = busy.generate(generate_call())
        await anext(stream)
        idle = pool.get("127.0.0.1:1")
        pool.get("127.0.0.1:2")
        assert len(pool) == 2
        assert pool.get(server.address) is busy
        with pytest.raises(WorkerLostError, match="closed the connection"):
            await idle.status()
        await stream.aclose()
        await pool.close()
        await server.stop()

    run(check)
