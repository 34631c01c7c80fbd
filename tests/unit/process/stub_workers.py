"""Workers that only report, over real gRPC: what discovery and the router see of a worker."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

from tandem.router.settings import RouterSettings
from tandem.routing.snapshot import Role
from tandem.rpc.credentials import Credentials, ProcessRole
from tandem.rpc.handlers import WorkerHandler
from tandem.rpc.messages import ModelInfo, WorkerAddress, WorkerRecord, WorkerStatus
from tandem.rpc.network import RpcServer
from tandem.rpc.server import serve_worker
from tests.helpers.secret import SECRET
from tests.unit.routing.builders import BLOCK_SIZE, worker

PATIENT_S = 10.0


def record(
    worker_id: str,
    incarnation: str = "1",
    *,
    address: str = "10.0.0.1:7900",
    role: str = "prefill",
    epoch: int = 0,
) -> WorkerRecord:
    return WorkerRecord(WorkerAddress(worker_id, address, incarnation), role=role, model="m", pool="model", epoch=epoch)


def model(name: str = "m", fingerprint: str = "weights", **changes: Any) -> ModelInfo:
    fields: dict[str, Any] = {"max_model_len": 4096, "vocab_size": 1000, "block_size": BLOCK_SIZE}
    return ModelInfo(name=name, fingerprint=fingerprint, **{**fields, **changes})


def status(
    worker_id: str,
    role: Role = Role.PREFILL,
    *,
    incarnation: str = "1",
    epoch: int = 1,
    lifecycle: str = "ready",
    served: ModelInfo | None = None,
    fields: dict[str, Any] | None = None,
    **state: Any,
) -> WorkerStatus:
    """A worker's status; `state` are fields of its `WorkerState`, `fields` other fields of the status."""
    return WorkerStatus(
        worker=WorkerAddress(worker_id, "", incarnation),
        pid=1,
        epoch=epoch,
        lifecycle=lifecycle,
        state=worker(worker_id, role, **state),
        model=served or model(),
        **(fields or {}),
    )


def router_settings(**fields: Any) -> RouterSettings:
    """Of a router at any free port."""
    return RouterSettings.model_validate({"bind": "127.0.0.1:0", "cluster_secret": SECRET.decode(), **fields})


class StubWorker:
    """Answers `watch` with its status, four times a second and whenever `tell` changes it; can fall silent."""

    def __init__(self, first: WorkerStatus) -> None:
        self._status = first
        self._changed = asyncio.Event()
        self._is_silent = False
        self.num_watchers = 0

    def tell(self, status: WorkerStatus) -> None:
        self._status = status
        self._changed.set()

    def hush(self, is_silent: bool = True) -> None:
        """Open streams stay open; nothing comes any more, as from a stopped process."""
        self._is_silent = is_silent

    async def status(self) -> WorkerStatus:
        return self._status

    async def watch(self, interval_s: float) -> AsyncIterator[WorkerStatus]:
        self.num_watchers += 1
        try:
            while True:
                self._changed.clear()
                if not self._is_silent:
                    yield self._status
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), interval_s)
        finally:
            self.num_watchers -= 1

    def __getattr__(self, name: str) -> object:
        """The server wants every method to be there; none but the above is called."""
        if name.startswith("_"):
            raise AttributeError(name)
        return None


@contextlib.asynccontextmanager
async def serving_worker(
    stub: StubWorker, bind: str = "127.0.0.1:0", *, secret: bytes = SECRET
) -> AsyncIterator[RpcServer]:
    """`stub` answers for the time of the block; then its connections break, as when a process dies."""
    server = await serve_worker(cast(WorkerHandler, stub), bind, Credentials(secret, ProcessRole.BOTH))
    try:
        yield server
    finally:
        await server.stop(0)


async def eventually(condition: Callable[[], object], timeout_s: float = PATIENT_S) -> None:
    """Wait until `condition` holds; fail when it does not in time."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)
