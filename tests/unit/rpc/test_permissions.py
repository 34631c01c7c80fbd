"""Permissions: the table is whole, and servers go by it."""

import asyncio
from dataclasses import replace

import grpc
import pytest

from tandem.core.errors import UntrustedPeerError
from tandem.core.scope import UNSCOPED
from tandem.rpc.client import RouterClient, WorkerClient
from tandem.rpc.credentials import ProcessRole
from tandem.rpc.messages import PairCall
from tandem.rpc.methods import ROUTER_SERVICE, WORKER_SERVICE
from tandem.rpc.permissions import ALLOWED, permission_problem
from tandem.rpc.server import serve_router, serve_worker
from tandem.rpc.v1 import router_pb2, worker_pb2
from tests.helpers.raw_calls import ended, header, opened
from tests.helpers.secret import AS_GATEWAY, AS_ROUTER, AS_WORKER
from tests.unit.rpc.handlers import HERE, Router, Worker, generate_call, run

SERVICES = {
    WORKER_SERVICE: worker_pb2.DESCRIPTOR.services_by_name["Worker"],
    ROUTER_SERVICE: router_pb2.DESCRIPTOR.services_by_name["Router"],
}
METHODS = {f"/{name}/{method.name}" for name, service in SERVICES.items() for method in service.methods}


def test_every_method_of_every_service_is_in_the_table() -> None:
    assert set(ALLOWED) == METHODS
    assert all(ALLOWED.values())


def test_a_method_that_is_not_in_the_table_is_refused_to_every_role() -> None:
    assert permission_problem("gateway", "/tandem.rpc.v1.Worker/New") == "a gateway may not call New; allowed: none"


@pytest.mark.parametrize("path", sorted(METHODS))
def test_only_the_roles_of_the_table_are_answered(path: str) -> None:
    """By real calls, of a message that no method takes: who is admitted is told that, the others that they may not."""

    async def check() -> None:
        worker, router = Worker(), Router()
        server = (
            await serve_worker(worker, "127.0.0.1:0", AS_WORKER)
            if WORKER_SERVICE in path
            else await serve_router(router, "127.0.0.1:0", AS_ROUTER)
        )
        async with grpc.aio.insecure_channel(server.address) as channel:
            for role in ProcessRole:
                session = await opened(channel, replace(AS_GATEWAY, role=role))
                body = b"" if path.endswith("/Serve") else b"\xff"
                end = await ended(channel, path, b"\xff", header(session, path, body))
                is_allowed = role in ALLOWED[path]
                assert end.code.name == ("INVALID_ARGUMENT" if is_allowed else "PERMISSION_DENIED"), (role, end)
                if not is_allowed:
                    assert end.details == permission_problem(role, path)
        assert worker.calls == router.calls == []
        await server.stop()

    run(check)


def test_a_caller_is_told_what_its_role_may_not() -> None:
    async def check() -> None:
        worker, router = Worker(), Router()
        servers = await asyncio.gather(
            serve_worker(worker, "127.0.0.1:0", AS_WORKER), serve_router(router, "127.0.0.1:0", AS_ROUTER)
        )
        peer, pairing = WorkerClient(servers[0].address, AS_WORKER), RouterClient(servers[1].address, AS_WORKER)
        with pytest.raises(
            UntrustedPeerError, match="refused Generate: a both may not call Generate; allowed: gateway"
        ):
            await anext(peer.generate(generate_call()))
        with pytest.raises(UntrustedPeerError, match="refused Serve: a both may not call Serve"):
            await anext(peer.serve(replace(generate_call(), decode=replace(HERE, incarnation=""))))
        with pytest.raises(UntrustedPeerError, match="refused Pair: a both may not call Pair"):
            await pairing.pair(
                PairCall(request_id="r", model="m", token_ids=(1,), num_expected_output=1, scope=UNSCOPED)
            )
        assert worker.calls == router.calls == []
        for each in (peer, pairing):
            await each.close()
        for server in servers:
            await server.stop()

    run(check)
