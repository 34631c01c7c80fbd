"""Many requests on one stream, against real servers: each fares as by a call of its own."""

import asyncio
import logging
import signal
import subprocess
import sys
import time
from array import array
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import pytest

from tandem.core.errors import (
    IncompatiblePeerError,
    InvalidRequestError,
    TandemError,
    UntrustedPeerError,
    WorkerLostError,
)
from tandem.core.output import RequestOutput
from tandem.core.sampling_params import SamplingParams
from tandem.rpc.channel import KEEPALIVE_S
from tandem.rpc.client import WorkerClient
from tandem.rpc.context import incoming_traceparent
from tandem.rpc.messages import GenerateCall, GenerateUpdate
from tandem.rpc.methods import GENERATE, OPEN
from tandem.rpc.network import RpcServer
from tandem.rpc.server import serve_router, serve_worker
from tandem.rpc.shared_stream import CREDIT_TOKENS, MAX_CALL_BYTES, MAX_STARTS, short_form
from tests.helpers.raw_calls import opener
from tests.helpers.secret import AS_GATEWAY, AS_ROUTER, AS_WORKER, serving_as
from tests.helpers.wire_tap import tapping
from tests.unit.rpc.handlers import HERE, Router, Worker, generate_call, run
from tests.unit.rpc.processes import MORTAL_WORKER
from tests.unit.rpc.test_server import ERRORS

ANY_PORT = "127.0.0.1:0"
PLAIN = SamplingParams()


class Talker(Worker):
    """Says a word at a time, to each request as many as it asks for; `said` counts those of each.

    A request is silent before the word that `held` names, until `go`. `broken`: raised for requests of that id.
    """

    def __init__(self) -> None:
        super().__init__()
        self.said: dict[str, int] = {}
        self.held: dict[str, int] = {}
        self.broken: dict[str, BaseException] = {}
        self.traces: dict[str, str | None] = {}
        self.gone: dict[str, asyncio.Event] = {}
        self.go = asyncio.Event()

    async def generate(self, call: GenerateCall) -> AsyncIterator[GenerateUpdate]:
        self.calls.append(("generate", call))
        self.traces[call.request_id] = incoming_traceparent.get()
        gone = self.gone.setdefault(call.request_id, asyncio.Event())
        try:
            for i in range(call.params.max_tokens or 0):
                if self.held.get(call.request_id) == i:
                    await self.go.wait()
                await asyncio.sleep(0)
                self.said[call.request_id] = i + 1
                yield GenerateUpdate(RequestOutput(call.request_id, 0, (i,), f"{i} "))
            if call.request_id in self.broken:
                raise self.broken[call.request_id]
        finally:
            gone.set()


def asked(request_id: str, num_tokens: int) -> GenerateCall:
    return replace(generate_call(num_tokens=num_tokens), request_id=request_id)


async def told(client: WorkerClient, call: GenerateCall, heard: list[int] | None = None) -> tuple[list[int], str]:
    """All that is said to a request; `heard` has the tokens even where it fails."""
    ids = [] if heard is None else heard
    text = ""
    async for update in client.serve(call):
        assert update.output.request_id == call.request_id
        ids += update.output.token_ids
        text += update.output.text
    return ids, text


def whole(num_tokens: int) -> tuple[list[int], str]:
    return list(range(num_tokens)), "".join(f"{i} " for i in range(num_tokens))


class Names(grpc.GenericRpcHandler):
    """Opens sessions, knows no other method, and notes the names of those that are called."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.incarnation = HERE.incarnation

    def service(self, handler_call_details: Any) -> "grpc.RpcMethodHandler[bytes, bytes] | None":
        if handler_call_details.method == OPEN.path:
            return opener(lambda: serving_as(self.incarnation))
        self.names.append(handler_call_details.method.rpartition("/")[2])
        return None


async def named_server(names: Names) -> tuple[Any, str]:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((names,))
    port = server.add_insecure_port(ANY_PORT)
    await server.start()
    return server, f"127.0.0.1:{port}"


async def both(worker: Worker, **more: Any) -> tuple[RpcServer, WorkerClient]:
    server = await serve_worker(worker, ANY_PORT, AS_WORKER, **more)
    return server, WorkerClient(server.address, AS_GATEWAY)


def test_many_requests_at_once_are_each_told_their_own_in_order() -> None:
    async def check() -> None:
        worker = Talker()
        server, client = await both(worker)
        sizes = {f"r{i}": i % 7 + 1 for i in range(2 * MAX_STARTS + 3)}
        answers = await asyncio.gather(*(told(client, asked(name, size)) for name, size in sizes.items()))
        assert answers == [whole(size) for size in sizes.values()]
        assert sorted(call.request_id for _, call in worker.calls) == sorted(sizes)
        assert client.is_idle
        await client.close()
        await server.stop()

    run(check)


def test_the_worker_gets_what_was_asked() -> None:
    async def check() -> None:
        worker = Worker()
        server, client = await both(worker)
        call = generate_call()
        assert [token async for update in client.serve(call) for token in update.output.token_ids] == [0, 1, 2]
        assert worker.calls == [("generate", call)]
        await client.close()
        await server.stop()

    run(check)


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_every_error_crosses_as_itself_after_what_was_said_and_concerns_no_other(error: TandemError) -> None:
    async def check() -> None:
        worker = Talker()
        worker.broken["bad"] = error
        worker.held["good"] = 2
        server, client = await both(worker)
        good = asyncio.ensure_future(told(client, asked("good", 4)))
        ids: list[int] = []
        with pytest.raises(TandemError) as caught:
            await told(client, asked("bad", 3), ids)
        assert ids == [0, 1, 2]
        assert (type(caught.value), str(caught.value)) == (type(error), str(error))
        assert getattr(caught.value, "retry_after_s", None) == getattr(error, "retry_after_s", None)
        worker.go.set()
        assert await good == whole(4)
        await client.close()
        await server.stop()

    run(check)


def test_a_bug_in_a_handler_is_logged_with_its_request_and_not_told(caplog: pytest.LogCaptureFixture) -> None:
    async def check() -> None:
        worker = Talker()
        worker.broken["bad"] = ZeroDivisionError("secret detail")
        server, client = await both(worker)
        with pytest.raises(WorkerLostError, match=r"INTERNAL.*ZeroDivisionError") as caught:
            await told(client, asked("bad", 1))
        assert "secret detail" not in str(caught.value)
        assert server.address in str(caught.value)
        assert await told(client, asked("good", 1)) == whole(1)
        await client.close()
        await server.stop()

    with caplog.at_level(logging.ERROR):
        run(check)
    (record,) = (one for one in caplog.records if one.name.startswith("tandem"))
    assert "request bad" in record.getMessage()


def test_a_handler_that_was_cancelled_from_within_ends_its_request() -> None:
    async def check() -> None:
        worker = Talker()
        worker.broken["bad"] = asyncio.CancelledError()
        server, client = await both(worker)
        with pytest.raises(WorkerLostError, match="Generate was cancelled by the process"):
            await told(client, asked("bad", 1))
        assert await told(client, asked("good", 1)) == whole(1)
        await client.close()
        await server.stop()

    run(check)


@pytest.mark.parametrize("held_at", [0, 2])
def test_a_request_that_is_left_here_is_cancelled_there_and_no_other(held_at: int) -> None:
    async def check() -> None:
        worker = Talker()
        worker.held |= {"left": held_at, "stays": 1}
        server, client = await both(worker)
        stays = asyncio.ensure_future(told(client, asked("stays", 3)))
        leaving = asyncio.ensure_future(told(client, asked("left", 3)))
        while "left" not in worker.gone or worker.said.get("left", 0) < held_at:
            await asyncio.sleep(0.001)  # until it is silent
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        await worker.gone["left"].wait()
        assert not worker.gone["stays"].is_set()
        worker.go.set()
        assert await stays == whole(3)
        assert client.is_idle
        await client.close()
        await server.stop()

    run(check)


def test_a_request_that_is_left_before_it_was_sent_never_begins_or_ends_at_once() -> None:
    async def check() -> None:
        worker = Talker()
        worker.held["left"] = 0
        server, client = await both(worker)
        leaving = asyncio.ensure_future(told(client, asked("left", 3)))
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        assert await told(client, asked("next", 2)) == whole(2)
        assert "left" not in worker.gone or worker.gone["left"].is_set()
        await client.close()
        await server.stop()

    run(check)


def test_requests_that_are_left_behind_a_full_message_of_openings_never_begin() -> None:
    async def check() -> None:
        worker = Talker()
        server, client = await both(worker)
        num_staying = MAX_STARTS
        staying = [asyncio.ensure_future(told(client, asked(f"stays {i}", 2))) for i in range(num_staying)]
        leaving = [asyncio.ensure_future(told(client, asked(f"left {i}", 2 * CREDIT_TOKENS))) for i in range(6)]
        await asyncio.sleep(0)
        for task in leaving:
            task.cancel()
        await asyncio.gather(*leaving, return_exceptions=True)
        assert await asyncio.gather(*staying) == num_staying * [whole(2)]
        assert await told(client, asked("next", 2)) == whole(2)
        assert not any(request_id.startswith("left") for request_id in worker.said)
        await client.close()
        await server.stop()

    run(check)


def test_whoever_takes_nothing_is_sent_no_more_than_its_room_and_holds_up_no_other() -> None:
    async def check() -> None:
        num_tokens = 5 * CREDIT_TOKENS
        worker = Talker()
        server, client = await both(worker)
        slow = client.serve(asked("slow", num_tokens))
        ids = list((await anext(slow)).output.token_ids)
        assert await told(client, asked("quick", 2 * CREDIT_TOKENS)) == whole(2 * CREDIT_TOKENS)
        assert worker.said["slow"] <= CREDIT_TOKENS + len(ids) + 1
        async for update in slow:
            ids += update.output.token_ids
        assert ids == list(range(num_tokens))
        await client.close()
        await server.stop()

    run(check)


def test_all_requests_of_a_worker_that_was_killed_are_lost_at_once() -> None:
    async def check() -> None:
        with subprocess.Popen([sys.executable, "-c", MORTAL_WORKER], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            port = int(await asyncio.to_thread(process.stdout.readline))
            client = WorkerClient(f"127.0.0.1:{port}", AS_GATEWAY)
            streams = [client.serve(generate_call(seed)) for seed in range(3)]
            for stream in streams:
                assert (await anext(stream)).output.token_ids == (0,)
            begin = time.perf_counter()
            process.send_signal(signal.SIGKILL)
            for stream in (*streams, client.serve(generate_call())):
                with pytest.raises(WorkerLostError, match=f"127.0.0.1:{port}"):
                    await anext(stream)
            assert time.perf_counter() - begin < KEEPALIVE_S / 2
            await client.close()

    run(check)


def test_a_server_that_stops_loses_its_requests_and_one_that_is_back_is_found() -> None:
    async def check() -> None:
        worker = Worker(num_before_silence=1)
        server, client = await both(worker)
        stream = client.serve(generate_call())
        await anext(stream)
        await server.stop()
        with pytest.raises(WorkerLostError):
            await anext(stream)
        await worker.cancelled.wait()
        server = await serve_worker(Talker(), server.address, AS_WORKER)
        while True:
            try:
                assert await told(client, asked("again", 2)) == whole(2)
                break
            except WorkerLostError:
                await asyncio.sleep(0.02)  # between tries, as a caller would
        await client.close()
        await server.stop()

    run(check)


def test_requests_that_begin_after_a_silence_have_a_stream_of_their_own() -> None:
    """Regression: they waited on the stream of a connection that was dead; those that run on it may yet be answered."""

    async def check() -> None:
        worker = Talker()
        worker.held["before"] = 1
        server = await serve_worker(worker, ANY_PORT, AS_WORKER)
        async with tapping(server.address) as tap:
            client = WorkerClient(tap.address, AS_GATEWAY)
            before = client.serve(asked("before", 2))
            assert (await anext(before)).output.token_ids == (0,)
            tap.hold()
            with pytest.raises(WorkerLostError, match="did not answer"):
                await client.status(timeout_s=0.2)
            assert await told(client, asked("after", 3)) == whole(3)
            assert len(tap.sent) == 2
            tap.release()
            worker.go.set()
            assert [update.output.token_ids async for update in before] == [(1,)]
            await client.status()
            assert client.is_idle
            await client.close()
        await server.stop()

    run(check)


def test_closing_a_client_fails_its_requests_and_cancels_them_there() -> None:
    async def check() -> None:
        worker = Worker(num_before_silence=1)
        server, client = await both(worker)
        stream = client.serve(generate_call())
        await anext(stream)
        following = asyncio.ensure_future(anext(stream))
        await worker.started.wait()
        assert not client.is_idle
        await client.close()
        with pytest.raises(WorkerLostError, match="closed the connection"):
            await following
        with pytest.raises(WorkerLostError, match="closed the connection"):
            await told(client, asked("late", 1))
        await worker.cancelled.wait()
        await server.stop()

    run(check)


def test_a_worker_of_an_older_version_is_called_for_each_request() -> None:
    async def check() -> None:
        server, client = await both(Talker(), is_shared=False)
        for size in (3, 4):
            assert await told(client, asked(f"r{size}", size)) == whole(size)
        await client.close()
        await server.stop()

    run(check)


def test_an_older_worker_is_asked_for_the_stream_once_until_it_is_another() -> None:
    async def check() -> None:
        names = Names()
        server, address = await named_server(names)
        client = WorkerClient(address, AS_GATEWAY)
        newer = replace(HERE, incarnation="b")
        for decode in (HERE, HERE, newer):
            names.incarnation = decode.incarnation
            with pytest.raises(IncompatiblePeerError, match="does not answer Generate"):
                await told(client, replace(generate_call(), decode=decode))
        assert names.names == ["Serve", "Generate", "Generate", "Serve", "Generate"]
        await client.close()
        await server.stop(None)

    run(check)


def test_a_request_that_a_worker_cannot_serve_with_its_version_is_not_sent_twice() -> None:
    async def check() -> None:
        worker = Talker()
        worker.broken["bad"] = IncompatiblePeerError("other blocks")
        server, client = await both(worker)
        with pytest.raises(IncompatiblePeerError, match="other blocks"):
            await told(client, asked("bad", 1))
        assert len(worker.calls) == 1
        await client.close()
        await server.stop()

    run(check)


def test_what_is_long_has_a_call_of_its_own() -> None:
    call = generate_call(prompt=array("I", [0]))
    num_bytes = len(GENERATE.request.encode(call))
    most = (MAX_CALL_BYTES - num_bytes - 64) // 4
    short = replace(call, prompt_token_ids=array("I", bytes(4 * most)))
    assert short_form(short) == GENERATE.request.encode(short)
    for num_more in range(1, 64):
        long = replace(call, prompt_token_ids=array("I", bytes(4 * (most + num_more))))
        data = GENERATE.request.encode(long)
        assert short_form(long) == (data if len(data) <= MAX_CALL_BYTES else None)
    assert short_form(long) is None, "the range above goes beyond the bound"


@pytest.mark.parametrize("params", [SamplingParams(logprobs=0), SamplingParams(prompt_logprobs=0)])
def test_what_has_long_answers_has_a_call_of_its_own(params: SamplingParams) -> None:
    assert short_form(replace(generate_call(), params=params)) is None


def test_a_long_prompt_is_served() -> None:
    async def check() -> None:
        worker = Talker()
        server, client = await both(worker)
        call = generate_call(num_tokens=2, prompt=array("I", range(126_000)))
        assert short_form(call) is None
        assert await told(client, call) == whole(2)
        assert worker.calls == [("generate", call)]
        await client.close()
        await server.stop()

    run(check)


def test_what_cannot_be_sent_is_the_callers_fault() -> None:
    async def check() -> None:
        client = WorkerClient("127.0.0.1:1", AS_GATEWAY)
        with pytest.raises(InvalidRequestError, match=r"GenerateRequest.prompt_token_ids=\(-1,\) cannot be sent"):
            await told(client, generate_call(prompt=(-1,)))
        assert client.is_idle
        await client.close()

    run(check)


def test_each_request_belongs_to_the_trace_it_was_asked_in() -> None:
    async def check() -> None:
        worker = Talker()
        server = await serve_worker(worker, ANY_PORT, AS_WORKER)
        current: list[tuple[str, str]] = []
        client = WorkerClient(server.address, AS_GATEWAY, metadata_source=lambda: current)
        await told(client, asked("none", 1))
        current.append(("traceparent", "00-a-b-01"))
        await told(client, asked("traced", 1))
        assert worker.traces == {"none": None, "traced": "00-a-b-01"}
        await client.close()
        await server.stop()

    run(check)


def test_only_the_cluster_is_let_in() -> None:
    async def check() -> None:
        worker = Talker()
        server = await serve_worker(worker, ANY_PORT, AS_WORKER)
        stranger = WorkerClient(server.address, replace(AS_GATEWAY, secret=b"theirs"))
        with pytest.raises(TandemError, match="same cluster secret"):
            await told(stranger, asked("r", 1))
        friend = WorkerClient(server.address, AS_GATEWAY)
        assert await told(friend, asked("r", 1)) == whole(1)
        assert len(worker.calls) == 1
        await stranger.close()
        await friend.close()
        await server.stop()

    run(check)


def test_a_router_is_not_a_worker() -> None:
    async def check() -> None:
        server = await serve_router(Router(), ANY_PORT, AS_ROUTER)
        client = WorkerClient(server.address, AS_GATEWAY)
        with pytest.raises(UntrustedPeerError, match="is a router; a both or decode or prefill was expected"):
            await told(client, asked("r", 1))
        await client.close()
        await server.stop()

    run(check)
