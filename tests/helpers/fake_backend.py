"""A router and decode workers behind real gRPC servers with a gateway before them: what a client sees of a cluster."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from openai import AsyncOpenAI

from tandem.core.errors import InvalidRequestError, TandemError, UnavailableError
from tandem.core.events import BlockEvent
from tandem.gateway.server import RunningGateway, serving_gateway
from tandem.gateway.settings import GatewaySettings
from tandem.locality.base import PublishResult
from tandem.routing.settlement import Settlement
from tandem.rpc.credentials import Credentials
from tandem.rpc.messages import (
    Decision,
    ModelInfo,
    PairCall,
    PairingAnswer,
    ProcessInfo,
    Registration,
    WorkerListing,
    WorkerRecord,
)
from tandem.rpc.network import RpcServer
from tandem.rpc.server import serve_router
from tandem.text.tokenizer import Tokenizer
from tests.helpers.fake_worker import MAX_MODEL_LEN, MODEL, FakeWorker, model_info, status_of, text_of
from tests.helpers.secret import AS_ROUTER, SECRET
from tests.helpers.tokenizers import write_byte_tokenizer

JSON_HEAD = "host: localhost\r\ncontent-type: application/json\r\n"  # of a request that a test spells itself
SAYS_JSON = {"content-type": "application/json"}
__all__ = ["MAX_MODEL_LEN", "MODEL", "SAYS_JSON", "FakeWorker", "model_info", "text_of"]


async def eventually(holds: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Wait until it holds."""
    async with asyncio.timeout(timeout_s):
        while not holds():
            await asyncio.sleep(0.002)


@dataclass(eq=False)
class FakeRouter:
    """Pairs with the first worker of `workers` that is not excluded; `refuse` is raised instead.

    is_stalled: answers nothing at all. answer_s: delay of its pairings and of its descriptions of models.
    `settled` gets every settlement, `decided` is what it tells.
    """

    workers: list[FakeWorker]
    refuse: TandemError | None = None
    is_stalled: bool = False
    answer_s: float = 0.0
    sampling_defaults: dict[str, float] = field(default_factory=dict)
    calls: list[PairCall] = field(default_factory=list)
    settled: list[Settlement] = field(default_factory=list)
    decided: list[Decision] = field(default_factory=list)
    server: RpcServer | None = None

    async def serve(self, bind: str = "127.0.0.1:0", credentials: Credentials = AS_ROUTER) -> None:
        self.server = await serve_router(RouterFace(self), bind, credentials)

    async def start_again(self, credentials: Credentials) -> None:
        """At the same address."""
        assert self.server is not None
        await self.kill()
        await self.serve(self.server.address, credentials)

    async def kill(self) -> None:
        assert self.server is not None
        await self.server.stop(0)

    async def pair(self, call: PairCall) -> PairingAnswer:
        self.calls.append(call)
        if self.is_stalled:
            await asyncio.Event().wait()
        await asyncio.sleep(self.answer_s)
        if self.refuse is not None:
            raise self.refuse
        free = [worker for worker in self.workers if worker.worker_id not in call.excluded]
        if not free:
            raise UnavailableError("no live decode worker is left", 2.0)
        return PairingAnswer(
            decode=free[0].address,
            fingerprint="f" * 32,
            predicted_ms={"ttft": 12.5},
            policy="first",
            decode_cached_blocks=1,
        )

    async def settle(self, settlement: Settlement) -> None:
        self.settled.append(settlement)

    async def describe(self) -> ProcessInfo:
        if self.is_stalled:
            await asyncio.Event().wait()
        return ProcessInfo(pid=os.getpid(), incarnation="first", lifecycle="ready")

    async def models(self) -> Sequence[ModelInfo]:
        if self.is_stalled:
            await asyncio.Event().wait()
        await asyncio.sleep(self.answer_s)
        return [model_info(len(self.workers), self.sampling_defaults)] if self.workers else []

    async def listings(self) -> Sequence[WorkerListing]:
        if self.is_stalled:
            await asyncio.Event().wait()
        return [WorkerListing(status=status_of(worker), age_s=0.1, is_alive=True) for worker in self.workers]

    async def decisions(self, num_latest: int) -> Sequence[Decision]:
        if self.is_stalled:
            await asyncio.Event().wait()
        return self.decided[-num_latest:]

    async def register(self, registration: Registration) -> Sequence[WorkerRecord]:
        return [registration.record]

    async def unregister(self, worker: WorkerRecord) -> None: ...

    async def publish(self, worker_id: str, epoch: int, events: Sequence[BlockEvent], sequence: int) -> PublishResult:
        raise InvalidRequestError(worker_id)

    async def replace(self, worker_id: str, epoch: int, hashes: Sequence[bytes], sequence: int) -> PublishResult:
        raise InvalidRequestError(worker_id)


class RouterFace:
    """`FakeRouter` under the handler's names: its `workers` is a list here and a method there."""

    def __init__(self, fake: FakeRouter) -> None:
        self.pair = fake.pair
        self.settle = fake.settle
        self.describe = fake.describe
        self.models = fake.models
        self.workers = fake.listings
        self.decisions = fake.decisions
        self.register = fake.register
        self.unregister = fake.unregister
        self.publish = fake.publish
        self.replace = fake.replace


@dataclass(eq=False)
class FakeCluster:
    """Running gateway with its fake routers and workers. `url`: of the gateway; `directory`: of the model."""

    routers: list[FakeRouter]
    workers: list[FakeWorker]
    directory: Path
    gateway: RunningGateway
    finished: asyncio.Event

    @property
    def url(self) -> str:
        return self.gateway.url


Story = Callable[[FakeCluster, httpx.AsyncClient], Awaitable[None]]


@contextlib.asynccontextmanager
async def running_cluster(
    directory: Path, num_workers: int = 2, num_routers: int = 1, **settings: Any
) -> AsyncIterator[FakeCluster]:
    """Workers, routers that know them all, and a gateway before them, for the time of the block."""
    write_byte_tokenizer(directory)
    tokenizer = Tokenizer.load(directory)
    async with contextlib.AsyncExitStack() as stack:
        workers = [FakeWorker(f"decode-{index}", tokenizer) for index in range(num_workers)]
        for worker in workers:
            await worker.serve()
            stack.push_async_callback(worker.kill)
        routers = [FakeRouter(list(workers)) for _ in range(num_routers)]
        for router in routers:
            await router.serve()
            stack.push_async_callback(router.kill)
        addresses = ",".join(router.server.address for router in routers if router.server is not None)
        options: dict[str, object] = {
            "port": 0,
            "cluster_secret": SECRET.decode(),
            "drain_timeout_s": 5.0,
            "failover_timeout_s": 2.0,
            "served_model_name": MODEL,
            **settings,
        }
        configured = GatewaySettings.model_validate({"model": str(directory), "routers": addresses, **options})
        gateway, finished = await stack.enter_async_context(serving_gateway(configured))
        yield FakeCluster(routers, workers, directory, gateway, finished)


def tell(directory: Path, story: Story, **options: Any) -> None:
    """Run a story against a cluster of its own, with a client of its gateway."""

    async def run() -> None:
        async with (
            running_cluster(directory, **options) as cluster,
            httpx.AsyncClient(base_url=cluster.url, timeout=20, verify=False) as client,
        ):
            await story(cluster, client)

    asyncio.run(run())


def sdk(cluster: FakeCluster, is_strict: bool = True) -> AsyncOpenAI:
    """The official client, which retries nothing; strict: it refuses what its types do not know."""
    return AsyncOpenAI(
        base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, _strict_response_validation=is_strict, timeout=20
    )
