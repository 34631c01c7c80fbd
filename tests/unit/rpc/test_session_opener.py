"""Handshakes and the calls that prove to belong to them, attacked on real sockets."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

import grpc
import pytest

from tandem.core.errors import (
    AnotherIncarnationError,
    IncompatibleProtocolError,
    TandemError,
    UntrustedPeerError,
    WorkerLostError,
    WorkerStoppedError,
)
from tandem.rpc import methods, proofs
from tandem.rpc.channel import CLIENT_OPTIONS, MAX_MESSAGE_BYTES
from tandem.rpc.client import WorkerClient, client_of
from tandem.rpc.credentials import WORKER_ROLES, Credentials, Party, ProcessRole
from tandem.rpc.messages import WorkerAddress
from tandem.rpc.network import RpcServer
from tandem.rpc.server import serve_worker
from tandem.rpc.session import Expected
from tandem.rpc.session_messages import OpenAnswer
from tandem.rpc.session_opener import SessionOpener
from tandem.rpc.session_table import NotAdmittedError, SessionTable
from tests.helpers.impostor import impostor
from tests.helpers.raw_calls import answer_to, ended, handshake, header, opened
from tests.helpers.secret import AS_GATEWAY, AS_OPERATOR, AS_WORKER, SECRET, serving_as
from tests.helpers.wire_tap import tapping
from tests.unit.rpc.handlers import STATUS, Worker, generate_call, run

ANY_PORT = "127.0.0.1:0"
STATUS_PATH = methods.STATUS.path
DRAIN_PATH = methods.DRAIN.path
QUIET_S = 0.5


@dataclass(frozen=True, slots=True)
class Scene:
    """A worker that serves, and a connection to it."""

    worker: Worker
    server: RpcServer
    channel: grpc.aio.Channel


def told(story: Callable[[Scene], Awaitable[None]]) -> None:
    async def check() -> None:
        worker = Worker()
        server = await serve_worker(worker, ANY_PORT, AS_WORKER)
        async with grpc.aio.insecure_channel(server.address) as channel:
            await story(Scene(worker, server, channel))
        await server.stop()

    run(check)


async def refusal(channel: grpc.aio.Channel, credentials: Credentials, **changes: Any) -> tuple[str, str]:
    """The status and words with which a handshake is refused."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answer_to(channel, handshake(credentials, **changes)[1])
    return caught.value.code().name, caught.value.details() or ""


def test_who_listens_to_all_of_it_can_call_nothing() -> None:
    """Regression: a bearer token travelled in clear with each call, and whoever read it could call everything."""

    async def check() -> None:
        worker = Worker()
        server = await serve_worker(worker, ANY_PORT, AS_WORKER)
        async with tapping(server.address) as tap:
            client = WorkerClient(tap.address, AS_OPERATOR)
            await client.status()
            await client.drain()
            assert worker.calls == [("status",), ("drain",)]
            await client.close()
            for secret in (SECRET, SECRET.hex().encode(), AS_OPERATOR.key(proofs.HANDSHAKE_PURPOSE)):
                assert secret not in tap.everything
            assert len(tap.sent) == 1
            again = await tap.send_again(0, QUIET_S)
        assert b"this handshake was made before" in again
        assert worker.calls == [("status",), ("drain",)]
        await server.stop()

    run(check)


def test_a_call_that_is_made_again_is_refused_and_so_is_one_that_was_changed() -> None:
    async def story(scene: Scene) -> None:
        session = await opened(scene.channel, AS_OPERATOR)
        recorded = header(session, DRAIN_PATH, b"")
        assert (await ended(scene.channel, DRAIN_PATH, b"", recorded)).code is grpc.StatusCode.OK
        again = await ended(scene.channel, DRAIN_PATH, b"", recorded)
        assert (again.code, again.details) == (
            grpc.StatusCode.UNAUTHENTICATED,
            "call 1 of this session was made before",
        )
        for path, data in ((STATUS_PATH, b""), (DRAIN_PATH, b"\x08\x01")):
            unused = header(session, DRAIN_PATH, b"")
            forged = await ended(scene.channel, path, data, unused)
            assert (forged.code, forged.details) == (
                grpc.StatusCode.UNAUTHENTICATED,
                "the call does not prove who sent it",
            )
        (key, value), *_ = header(session, DRAIN_PATH, b"")
        session_id, number, proof = value.split(".")
        for wrong in (f"{session_id}.{int(number) + 1}.{proof}", f"{session_id}.{number}.{proof[:-1]}", "..", "a.1.b"):
            assert (await ended(scene.channel, DRAIN_PATH, b"", ((key, wrong),))).code.name == "UNAUTHENTICATED"
        assert scene.worker.calls == [("drain",)]

    told(story)


def test_a_session_of_one_server_is_none_of_another() -> None:
    async def story(scene: Scene) -> None:
        other = Worker()
        server = await serve_worker(other, ANY_PORT, replace(AS_WORKER, incarnation="other"))
        recorded = header(await opened(scene.channel, AS_OPERATOR), DRAIN_PATH, b"")
        async with grpc.aio.insecure_channel(server.address) as channel:
            end = await ended(channel, DRAIN_PATH, b"", recorded)
        assert (end.code.name, end.details) == ("UNAUTHENTICATED", "this session is not known here")
        assert other.calls == []
        await server.stop()

    told(story)


def test_a_stranger_opens_no_session() -> None:
    async def story(scene: Scene) -> None:
        stranger = replace(AS_GATEWAY, secret=b"a secret of somebody else")
        assert await refusal(scene.channel, stranger) == ("UNAUTHENTICATED", "the cluster secret differs")
        for change in (
            {"party": Party("operator", "", AS_GATEWAY.incarnation)},
            {"nonce": bytes(32)},
            {"newest_protocol": 9},
            {"expected_incarnation": AS_WORKER.incarnation},
            {"proof": b""},
        ):
            assert (await refusal(scene.channel, AS_GATEWAY, **change))[0] == "UNAUTHENTICATED"
        assert (await refusal(scene.channel, AS_GATEWAY, nonce=b"short"))[0] == "INVALID_ARGUMENT"

    told(story)


def test_a_handshake_that_is_made_again_is_refused() -> None:
    async def story(scene: Scene) -> None:
        begun, call = handshake(AS_OPERATOR)
        session = begun.session(await answer_to(scene.channel, call))
        with pytest.raises(grpc.aio.AioRpcError, match="this handshake was made before"):
            await answer_to(scene.channel, call)
        assert (await ended(scene.channel, DRAIN_PATH, b"", header(session, DRAIN_PATH, b""))).code.name == "OK"

    told(story)


def test_handshakes_made_again_drive_out_no_session_in_use() -> None:
    table = SessionTable(AS_WORKER, max_sessions=2, max_unused=2)
    begun = [handshake(replace(AS_GATEWAY, incarnation=str(number))) for number in range(6)]
    first = begun[0][0].session(table.open(begun[0][1]))
    table.admit(first.signed(STATUS_PATH), STATUS_PATH, b"")
    for _, call in begun[1:]:
        table.open(call)
    assert len(table) == 3
    assert table.admit(first.signed(STATUS_PATH), STATUS_PATH, b"").incarnation == "0"
    for each, call in (handshake(AS_GATEWAY) for _ in range(2)):
        session = each.session(table.open(call))
        table.admit(session.signed(STATUS_PATH), STATUS_PATH, b"")
    with pytest.raises(NotAdmittedError, match="not known here"):
        table.admit(first.signed(STATUS_PATH), STATUS_PATH, b"")


def forged(**changes: Any) -> Callable[[bytes], bytes]:
    """An answer by somebody with another secret, who says what a worker would say."""

    def answer(data: bytes) -> bytes:
        call = methods.OPEN.request.decode(data)
        theirs = Credentials(b"not the secret of the cluster", ProcessRole.BOTH)
        proof = proofs.client_proof(
            theirs.key(proofs.HANDSHAKE_PURPOSE), call.party, call.nonce, call.protocols, call.expected_incarnation
        )
        honest = SessionTable(theirs).open(replace(call, proof=proof))
        return methods.OPEN.answer.encode(replace(honest, **changes))

    return answer


def reflected(data: bytes) -> bytes:
    """The client's own words."""
    call = methods.OPEN.request.decode(data)
    return methods.OPEN.answer.encode(
        OpenAnswer(party=call.party, nonce=call.nonce, session_id=bytes(16), protocol=2, proof=call.proof)
    )


@pytest.mark.parametrize("answer", [forged(), forged(proof=b""), reflected], ids=["forged", "no proof", "reflected"])
def test_an_impostor_is_sent_nothing(answer: Callable[[bytes], bytes]) -> None:
    """Regression: a false worker was sent the token and the prompt with the first call."""

    async def check() -> None:
        async with impostor(answer) as (address, called):
            client = WorkerClient(address, AS_GATEWAY)
            for asked in (
                client.status(),
                anext(client.generate(generate_call())),
                anext(client.serve(generate_call())),
            ):
                with pytest.raises(UntrustedPeerError, match="does not prove that it knows the cluster secret"):
                    await asked
            assert set(called) == {"Open"}
            await client.close()

    run(check)


def refusing(code: grpc.StatusCode, details: str, *trailing: tuple[str, str]) -> "grpc.RpcMethodHandler[bytes, bytes]":
    async def serve(data: bytes, context: Any) -> bytes:
        answer: bytes = await context.abort(code, details, trailing)
        return answer

    return grpc.unary_unary_rpc_method_handler(serve)


@pytest.mark.parametrize(
    ("code", "claimed", "kind"),
    [
        ("INVALID_ARGUMENT", "InvalidRequestError", WorkerLostError),
        ("RESOURCE_EXHAUSTED", "CapacityError", WorkerLostError),
        ("RESOURCE_EXHAUSTED", "", WorkerLostError),
        ("INVALID_ARGUMENT", "", WorkerLostError),
        ("INTERNAL", "ConfigurationError", WorkerLostError),
        ("UNAVAILABLE", "AnotherIncarnationError", WorkerLostError),
        ("UNAVAILABLE", "", WorkerLostError),
        ("FAILED_PRECONDITION", "IncompatiblePeerError", WorkerLostError),
        ("UNAUTHENTICATED", "", UntrustedPeerError),
        ("UNAVAILABLE", "UntrustedPeerError", UntrustedPeerError),
        ("UNAVAILABLE", "IncompatibleProtocolError", IncompatibleProtocolError),
        ("UNIMPLEMENTED", "CapacityError", IncompatibleProtocolError),
    ],
)
def test_the_words_of_who_has_not_proved_itself_are_not_passed_on(
    code: str, claimed: str, kind: type[TandemError]
) -> None:
    """Regression: who took a dead worker's port answered clients of the gateway 400 or 429 with words of its own."""

    async def check() -> None:
        words = "handshake failed: send your key to mallory.example"
        trailing = (("tandem-error", claimed), ("tandem-retry-after-s", "100000")) if claimed else ()
        server = grpc.aio.server()
        handlers = {"Open": refusing(grpc.StatusCode[code], words, *trailing)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(methods.SESSION_SERVICE, handlers),))
        address = f"127.0.0.1:{server.add_insecure_port(ANY_PORT)}"
        await server.start()
        client = WorkerClient(address, AS_GATEWAY)
        for ask in (client.status(), anext(client.generate(generate_call())), anext(client.serve(generate_call()))):
            with pytest.raises(TandemError, match=address) as caught:
                await ask
            assert type(caught.value) is kind
            assert "mallory" not in str(caught.value)
            assert getattr(caught.value, "retry_after_s", None) is None
        await client.close()
        await server.stop(None)

    run(check)


def test_an_answer_that_is_too_long_is_no_full_worker() -> None:
    """Regression: gRPC's own refusal to read it was a CapacityError, and a client was told to try again later."""

    async def check() -> None:
        async with impostor(lambda _: bytes(MAX_MESSAGE_BYTES + 1)) as (address, _):
            client = WorkerClient(address, AS_GATEWAY)
            with pytest.raises(WorkerLostError, match="ended the handshake before it proved who it is"):
                await client.status()
            await client.close()

    run(check)


def test_a_recorded_answer_proves_nothing_to_the_next_handshake() -> None:
    async def story(scene: Scene) -> None:
        _, call = handshake(AS_GATEWAY)
        recorded = methods.OPEN.answer.encode(await answer_to(scene.channel, call))
        async with impostor(lambda _: recorded) as (address, called):
            client = WorkerClient(address, AS_GATEWAY)
            with pytest.raises(UntrustedPeerError, match="does not prove that it knows the cluster secret"):
                await client.status()
            assert called == ["Open"]
            await client.close()

    told(story)


def test_what_is_not_of_tandem_is_said_to_be_too_old_or_foreign() -> None:
    async def check() -> None:
        server = grpc.aio.server()
        port = server.add_insecure_port(ANY_PORT)
        await server.start()
        client = WorkerClient(f"127.0.0.1:{port}", AS_GATEWAY)
        with pytest.raises(IncompatibleProtocolError, match=r"speaks protocol 1 or .* this process speaks 2 to 2"):
            await client.status()
        await client.close()
        await server.stop(None)

    run(check)


def test_a_worker_at_another_address_than_was_announced_is_refused() -> None:
    """Detects proxies that announce their own address: the worker to which they pass calls on names another."""

    async def story(scene: Scene) -> None:
        async with tapping(scene.server.address) as tap:
            client = client_of(WorkerAddress("d0", tap.address), AS_OPERATOR)
            with pytest.raises(UntrustedPeerError, match=f"{scene.server.address}; {tap.address} was expected"):
                await client.status()
            await client.close()
        unnamed = client_of(WorkerAddress("", scene.server.address), AS_OPERATOR)
        assert await unnamed.status() == STATUS
        await unnamed.close()
        assert len(scene.worker.calls) == 1

    told(story)


def test_another_incarnation_is_sent_nothing() -> None:
    async def story(scene: Scene) -> None:
        client = WorkerClient(scene.server.address, AS_GATEWAY)
        await client.status()
        former = replace(generate_call(), decode=WorkerAddress("d0", scene.server.address, "former"))
        for asked in (client.generate(former), client.serve(former)):
            with pytest.raises(AnotherIncarnationError, match=f"incarnation {AS_WORKER.incarnation} now, not former"):
                await anext(asked)
        assert scene.worker.calls == [("status",)]
        await client.close()
        _, call = handshake(AS_GATEWAY)
        proof = proofs.client_proof(
            AS_GATEWAY.key(proofs.HANDSHAKE_PURPOSE), call.party, call.nonce, call.protocols, "former"
        )
        with pytest.raises(grpc.aio.AioRpcError, match="now, not former"):
            await answer_to(scene.channel, replace(call, expected_incarnation="former", proof=proof))

    told(story)


def test_releases_too_far_apart_are_told_both_ranges() -> None:
    async def story(scene: Scene) -> None:
        _, call = handshake(AS_GATEWAY)
        key, future = AS_GATEWAY.key(proofs.HANDSHAKE_PURPOSE), (7, 8)
        proof = proofs.client_proof(key, call.party, call.nonce, future, "")
        with pytest.raises(grpc.aio.AioRpcError, match="speaks protocols 7 to 8, this process 2 to 2") as caught:
            await answer_to(scene.channel, replace(call, oldest_protocol=7, newest_protocol=8, proof=proof))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE

    told(story)


async def asked(client: WorkerClient) -> object:
    return await client.status()


async def streamed(client: WorkerClient) -> object:
    return [update.output.token_ids async for update in client.generate(generate_call())]


async def shared(client: WorkerClient) -> object:
    return [token async for update in client.serve(generate_call()) for token in update.output.token_ids]


@pytest.mark.parametrize("ask", [asked, streamed, shared], ids=lambda ask: ask.__name__)
def test_a_server_that_forgot_the_session_is_greeted_again_unnoticed(
    ask: Callable[[WorkerClient], Awaitable[object]],
) -> None:
    async def check() -> None:
        server = await serve_worker(Worker(), ANY_PORT, serving_as("first"))
        client = WorkerClient(server.address, AS_GATEWAY)
        before = await ask(client)
        await server.stop()
        server = await serve_worker(Worker(), server.address, serving_as("second"))
        async with asyncio.timeout(10):
            while True:
                try:
                    assert await ask(client) == before
                    break
                except WorkerLostError as error:  # NOTE: the connection, which ends and is made again in its own time
                    if not isinstance(error, WorkerStoppedError) and "UNAVAILABLE" not in str(error):
                        raise
                    await asyncio.sleep(0.02)
        await client.close()
        await server.stop()

    run(check)


@pytest.mark.parametrize("ask", [asked, streamed, shared], ids=lambda ask: ask.__name__)
def test_who_takes_the_address_of_a_server_that_ended_is_sent_nothing(
    ask: Callable[[WorkerClient], Awaitable[object]],
) -> None:
    """Regression: the connection was made again by itself, and calls went on with the session of the one before."""

    async def check() -> None:
        server = await serve_worker(Worker(), ANY_PORT, AS_WORKER)
        client = WorkerClient(server.address, AS_GATEWAY)
        await ask(client)
        await server.stop()
        async with impostor(forged(), server.address) as (_, called):
            while not called:
                with pytest.raises((UntrustedPeerError, WorkerLostError)):
                    await ask(client)
                await asyncio.sleep(0.02)  # between tries: the connection is made again in its own time
            with pytest.raises(UntrustedPeerError, match="does not prove that it knows the cluster secret"):
                await ask(client)
            assert set(called) == {"Open"}
        await client.close()

    run(check)


async def connected_again(channel: grpc.aio.Channel) -> None:
    """By the channel itself; it was connected, and what was there has ended."""
    await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
    while (state := channel.get_state(try_to_connect=True)) is not grpc.ChannelConnectivity.READY:
        await channel.wait_for_state_change(state)


def test_a_session_ends_with_its_connection_though_nobody_called_meanwhile() -> None:
    """Regression: once the channel had connected again by itself, the session counted as ready again, and calls were
    signed and sent to whoever had taken the address.
    """

    async def check() -> None:
        server = await serve_worker(Worker(), ANY_PORT, AS_WORKER)
        async with grpc.aio.insecure_channel(server.address, options=CLIENT_OPTIONS) as channel:
            opener = SessionOpener(channel, server.address, AS_GATEWAY, Expected(WORKER_ROLES))
            session = await opener.opened("")
            assert opener.ready("") is session
            await server.stop()
            async with impostor(forged(), server.address) as (_, called):
                await connected_again(channel)
                assert opener.ready("") is None
                with pytest.raises(UntrustedPeerError, match="does not prove"):
                    await opener.opened("")
                assert called == ["Open"]
            await opener.close()

    run(check)


class Breaking:
    """A channel to a real table of sessions whose connection breaks `num_breaks` times, as a handshake ends."""

    def __init__(self, num_breaks: int) -> None:
        self.num_handshakes = 0
        self._num_breaks = num_breaks
        self._table = SessionTable(AS_WORKER)

    def unary_unary(self, path: str) -> Callable[..., Awaitable[bytes]]:
        return self._answer

    async def _answer(self, data: bytes, *, timeout: float) -> bytes:
        self.num_handshakes += 1
        return methods.OPEN.answer.encode(self._table.open(methods.OPEN.request.decode(data)))

    def get_state(self) -> grpc.ChannelConnectivity:
        is_over = self.num_handshakes <= self._num_breaks
        return grpc.ChannelConnectivity.IDLE if is_over else grpc.ChannelConnectivity.READY

    async def wait_for_state_change(self, state: grpc.ChannelConnectivity) -> None:
        await asyncio.Future()


def test_a_session_whose_connection_broke_as_it_was_opened_is_opened_again() -> None:
    """Regression: the call was made with it, over whatever connection gRPC made then."""

    async def check() -> None:
        channel: Any = Breaking(1)
        opener = SessionOpener(channel, "there", AS_GATEWAY, Expected(WORKER_ROLES))
        assert await opener.opened("") is opener.ready("")
        assert channel.num_handshakes == 2
        channel = Breaking(9)
        with pytest.raises(WorkerLostError, match="breaks whenever a session is open"):
            await SessionOpener(channel, "there", AS_GATEWAY, Expected(WORKER_ROLES)).opened("")
        assert channel.num_handshakes == 3

    run(check)


def test_a_stale_pairing_ends_no_session() -> None:
    """Regression: calls of others waited for another handshake, or failed with it."""

    async def story(scene: Scene) -> None:
        opener = SessionOpener(scene.channel, scene.server.address, AS_GATEWAY, Expected(WORKER_ROLES))
        session = await opener.opened("")
        asked = asyncio.create_task(opener.opened("former"))
        await asyncio.sleep(0)
        assert opener.ready(AS_WORKER.incarnation) is session
        with pytest.raises(AnotherIncarnationError):
            await asked
        assert opener.ready(AS_WORKER.incarnation) is not None
        await opener.close()

    told(story)


def test_calls_made_at_once_wait_for_one_handshake() -> None:
    async def story(scene: Scene) -> None:
        async with tapping(scene.server.address) as tap:
            client = WorkerClient(tap.address, AS_GATEWAY)
            assert await asyncio.gather(*(client.status() for _ in range(20))) == [STATUS] * 20
            assert tap.everything.count(b"tandem.rpc.v1.Session/Open") == 1
            await client.close()

    told(story)


def test_a_caller_that_leaves_ends_no_handshake_of_others() -> None:
    async def check() -> None:
        may_answer = asyncio.Event()
        table = SessionTable(AS_WORKER)

        async def slow(data: bytes, context: object) -> bytes:
            await may_answer.wait()
            return methods.OPEN.answer.encode(table.open(methods.OPEN.request.decode(data)))

        async def status(data: bytes, context: object) -> bytes:
            return methods.STATUS.answer.encode(STATUS)

        server = grpc.aio.server()
        for service, name, serve in (
            (methods.SESSION_SERVICE, "Open", slow),
            (methods.WORKER_SERVICE, "Status", status),
        ):
            handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(serve)
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {name: handler}),))
        port = server.add_insecure_port(ANY_PORT)
        await server.start()
        client = WorkerClient(f"127.0.0.1:{port}", AS_GATEWAY)
        leaves, stays = asyncio.create_task(client.status()), asyncio.create_task(client.status())
        with pytest.raises(WorkerLostError, match=r"Status at .* did not answer within 0.1 s"):
            await client.status(timeout_s=0.1)
        leaves.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaves
        may_answer.set()
        assert await stays == STATUS
        assert client.is_idle
        await client.close()
        await server.stop(None)

    run(check)


def test_a_client_that_is_closed_during_its_handshake_fails_its_calls() -> None:
    async def check() -> None:
        is_asked = asyncio.Event()

        async def never(data: bytes, context: object) -> bytes:
            is_asked.set()
            return await asyncio.Future()

        server = grpc.aio.server()
        handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(never)
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(methods.SESSION_SERVICE, {"Open": handler}),)
        )
        port = server.add_insecure_port(ANY_PORT)
        await server.start()
        client = WorkerClient(f"127.0.0.1:{port}", AS_GATEWAY)
        asking = asyncio.create_task(client.status())
        await is_asked.wait()
        await client.close()
        with pytest.raises(TandemError, match="closed the connection"):
            await asking
        await server.stop(None)

    run(check)
