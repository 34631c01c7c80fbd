"""A real router with stub workers behind it: what the planner sees of a fleet, over real gRPC."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

from tandem.router.process import serving_router
from tandem.routing.snapshot import Role
from tandem.rpc.messages import WorkerStatus
from tandem.rpc.network import RpcServer
from tests.unit.process.stub_workers import StubWorker, router_settings, serving_worker, status


@dataclass(frozen=True, slots=True)
class StubFleet:
    """`stubs` and `servers` in the order of the workers; stop a server and its worker is dead."""

    router: str
    stubs: list[StubWorker]
    servers: list[RpcServer]
    statuses: list[WorkerStatus]

    def tell(self, number: int, **changes: object) -> None:
        """A worker's status from now on; changes are fields of its status."""
        self.statuses[number] = replace(self.statuses[number], **changes)  # type: ignore[arg-type]
        self.stubs[number].tell(self.statuses[number])


@contextlib.asynccontextmanager
async def stub_fleet(*workers: WorkerStatus) -> AsyncIterator[StubFleet]:
    """`workers` as they say they are, but at their real addresses."""
    async with contextlib.AsyncExitStack() as opened:
        stubs, servers, statuses = [], [], []
        for worker in workers:
            stub = StubWorker(worker)
            server = await opened.enter_async_context(serving_worker(stub))
            found = replace(worker, worker=replace(worker.worker, address=server.address))
            stub.tell(found)
            stubs.append(stub)
            servers.append(server)
            statuses.append(found)
        addresses = ",".join(server.address for server in servers)
        router = await opened.enter_async_context(serving_router(router_settings(workers=addresses)))
        yield StubFleet(router.address, stubs, servers, statuses)


def prefill(worker_id: str = "p-0", **state: object) -> WorkerStatus:
    return status(worker_id, Role.PREFILL, **state)  # type: ignore[arg-type]


def decode(worker_id: str = "d-0", **state: object) -> WorkerStatus:
    return status(worker_id, Role.DECODE, **state)  # type: ignore[arg-type]
