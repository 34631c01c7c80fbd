"""Clients of a worker and of a router: the methods of `handlers`, called in another process.

Every method raises what the handler raised, and `WorkerLostError` naming the address when there is no answer. Methods
also raise `UntrustedPeerError` when the cluster's secrets differ or the process is not the expected one, and
`IncompatibleProtocolError` when the releases are too far apart. `timeout_s` bounds a whole call, a stream's included;
None = no limit.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, Generic, Protocol, TypeVar

from tandem.core.errors import IncompatiblePeerError, InvalidRequestError, UnknownPromptError
from tandem.core.events import BlockEvent
from tandem.locality.base import PublishResult
from tandem.routing.settlement import Settlement
from tandem.rpc import methods
from tandem.rpc.block_messages import BlockReport, BlockSnapshot
from tandem.rpc.credentials import ROUTER_ROLES, WORKER_ROLES, Credentials
from tandem.rpc.grpc_connection import GrpcConnection
from tandem.rpc.messages import (
    ConfirmAnswer,
    ConfirmCall,
    Decision,
    GenerateCall,
    GenerateUpdate,
    Greeting,
    LeaseCall,
    LeaseUpdate,
    ModelInfo,
    PairCall,
    PairingAnswer,
    PrefillCall,
    PrefillUpdate,
    ProcessInfo,
    Registration,
    WorkerAddress,
    WorkerListing,
    WorkerRecord,
    WorkerStatus,
)
from tandem.rpc.network import MetadataSource, RpcConnection, current_network
from tandem.rpc.prompt_reuse import PromptSender, ReusablePrompts
from tandem.rpc.session import Expected
from tandem.rpc.shared_stream import SharedStream, short_form

AnyCall = TypeVar("AnyCall", GenerateCall, PrefillCall)
AnyUpdate = TypeVar("AnyUpdate")
DEFAULT_TIMEOUT_S = 5.0  # of calls with one answer
DEFAULT_MAX_CLIENTS = 1024  # of a pool; each has a connection


def _connect(
    address: str, credentials: Credentials, expected: Expected, metadata_source: MetadataSource | None
) -> RpcConnection:
    """Opens a connection over gRPC, or over the network that is set in this context, such as the simulation's."""
    network = current_network.get()
    connect = GrpcConnection if network is None else network.connect
    return connect(address, credentials, expected, metadata_source)


class _Client:
    """Common part of both clients: one connection."""

    def __init__(self, connection: RpcConnection) -> None:
        self._connection = connection

    @property
    def address(self) -> str:
        """Address of the process that it calls, host:port."""
        return self._connection.address

    @property
    def is_idle(self) -> bool:
        """Whether no call runs."""
        return self._connection.num_calls == 0

    async def close(self) -> None:
        """End the connection; calls that still run fail with `WorkerLostError`."""
        await self._connection.close()


class WorkerClient(_Client):
    """Client of a worker in another process; its methods are described at `handlers.WorkerHandler`. Closing or
    cancelling a stream ends the call at the worker within moments.

    Args:
        credentials: of this process.
        advertised: the address that the worker must state as its own; None = any.
        metadata_source: called at the start of each call for further headers, such as its trace.
        prompts: prompts sent before, so that only new tokens are sent; None = every prompt is sent whole.
    """

    def __init__(
        self,
        address: str,
        credentials: Credentials,
        *,
        advertised: str | None = None,
        metadata_source: MetadataSource | None = None,
        prompts: ReusablePrompts | None = None,
    ) -> None:
        super().__init__(_connect(address, credentials, Expected(WORKER_ROLES, advertised), metadata_source))
        self._prompts = prompts
        self._shared_stream: SharedStream | None = None
        self._retired: list[SharedStream] = []
        self._unshared: WorkerAddress | None = None

    async def close(self) -> None:
        streams = self._retired if self._shared_stream is None else [*self._retired, self._shared_stream]
        await asyncio.gather(*(stream.close() for stream in streams))
        await super().close()

    def serve(self, call: GenerateCall) -> AsyncGenerator[GenerateUpdate, None]:
        """Like `generate`, at less cost: known beginnings of long prompts are not sent again, and requests share one
        stream.

        Requests whose messages may be long, and requests to a worker of an older version, get a call of their own.
        """
        if self._prompts is None:
            return self._serve(call)
        return self._shortened(self._prompts, call, call.decode, self._serve)

    async def _shortened(
        self,
        prompts: ReusablePrompts,
        call: AnyCall,
        worker: WorkerAddress | None,
        send: Callable[[AnyCall], AsyncGenerator[AnyUpdate, None]],
    ) -> AsyncGenerator[AnyUpdate, None]:
        """Sends only the new part of the prompt, or the whole where that is refused, and yields the updates."""
        sender = PromptSender(prompts, f"{self.address} {_incarnation(worker)}", call)
        while True:
            try:
                async with aclosing(send(sender.next())) as updates:
                    async for update in updates:
                        sender.note_answer()
                        yield update
                return
            except (UnknownPromptError, InvalidRequestError) as error:
                sender.note_error(error)

    async def _serve(self, call: GenerateCall) -> AsyncGenerator[GenerateUpdate, None]:
        data = short_form(call) if call.decode is None or call.decode != self._unshared else None
        if data is not None:
            await self._connection.require(methods.GENERATE, _incarnation(call.decode))
            shared_stream = self._live_stream()
            try:
                async with aclosing(shared_stream.generate(data, call.request_id)) as shared:
                    async for update in shared:
                        yield update
                return
            except IncompatiblePeerError:
                if shared_stream.was_answered:
                    raise
                self._unshared = call.decode
        async with aclosing(self.generate(call)) as own:
            async for update in own:
                yield update

    def _live_stream(self) -> SharedStream:
        if self._shared_stream is None or not self._shared_stream.accepts_requests:
            self._retire_stream()
            self._shared_stream = SharedStream(self._connection)
            self._shared_stream.start()
        return self._shared_stream

    def _retire_stream(self) -> None:
        """Stops using the shared stream for new requests. NOTE: its running requests may still be answered."""
        self._retired = [stream for stream in self._retired if not stream.has_ended]
        if self._shared_stream is not None and not self._shared_stream.has_ended:
            self._shared_stream.retire()
            self._retired.append(self._shared_stream)

    async def status(self, *, timeout_s: float | None = DEFAULT_TIMEOUT_S) -> WorkerStatus:
        return await self._connection.call(methods.STATUS, None, timeout_s)

    def watch(self, interval_s: float, *, timeout_s: float | None = None) -> AsyncGenerator[WorkerStatus, None]:
        return self._connection.stream(methods.WATCH, interval_s, timeout_s)

    async def drain(self, *, timeout_s: float | None = DEFAULT_TIMEOUT_S) -> None:
        await self._connection.call(methods.DRAIN, None, timeout_s)

    def generate(self, call: GenerateCall, *, timeout_s: float | None = None) -> AsyncGenerator[GenerateUpdate, None]:
        return self._connection.stream(methods.GENERATE, call, timeout_s, _incarnation(call.decode))

    def prefill(self, call: PrefillCall, *, timeout_s: float | None = None) -> AsyncGenerator[PrefillUpdate, None]:
        """NOTE: the known beginning of a long prompt is not sent again, as in `serve`."""

        def send(call: PrefillCall) -> AsyncGenerator[PrefillUpdate, None]:
            return self._connection.stream(methods.PREFILL, call, timeout_s, _incarnation(call.prefill))

        return send(call) if self._prompts is None else self._shortened(self._prompts, call, call.prefill, send)

    async def greet(self, greeting: Greeting, *, timeout_s: float | None = DEFAULT_TIMEOUT_S) -> Greeting:
        return await self._connection.call(methods.GREET, greeting, timeout_s)

    async def lease(self, call: LeaseCall, *, timeout_s: float | None = DEFAULT_TIMEOUT_S) -> LeaseUpdate:
        return await self._connection.call(methods.LEASE, call, timeout_s)

    async def renew(self, lease_ids: Sequence[str], *, timeout_s: float | None = DEFAULT_TIMEOUT_S) -> Sequence[str]:
        return await self._connection.call(methods.RENEW, lease_ids, timeout_s)

    async def confirm(self, call: ConfirmCall, *, timeout_s: float | None = DEFAULT_TIMEOUT_S) -> ConfirmAnswer:
        return await self._connection.call(methods.CONFIRM, call, timeout_s)

    async def release(self, lease_ids: Sequence[str], *, timeout_s: float | None = DEFAULT_TIMEOUT_S) -> None:
        await self._connection.call(methods.RELEASE, lease_ids, timeout_s)


def client_of(
    worker: WorkerAddress,
    credentials: Credentials,
    *,
    metadata_source: MetadataSource | None = None,
    prompts: ReusablePrompts | None = None,
) -> WorkerClient:
    """Client of a listed worker.

    A worker known by its id must state the listed address as its own; a configured address (no id) may differ from the
    one that the worker states.
    """
    advertised = worker.address if worker.worker_id else None
    return WorkerClient(
        worker.address, credentials, advertised=advertised, metadata_source=metadata_source, prompts=prompts
    )


class RouterClient(_Client):
    """Client of a router in another process; its methods are described at `handlers.RouterHandler`.

    Several routers may share the address: after a call that was not answered in time, the next one opens a new
    connection.
    """

    def __init__(
        self,
        address: str,
        credentials: Credentials,
        *,
        metadata_source: MetadataSource | None = None,
        prompts: ReusablePrompts | None = None,
    ) -> None:
        super().__init__(_connect(address, credentials, Expected(ROUTER_ROLES), metadata_source))
        self._prompts = prompts

    async def pair(self, call: PairCall, *, timeout_s: float | None = DEFAULT_TIMEOUT_S) -> PairingAnswer:
        if self._prompts is None:
            return await self._connection.call(methods.PAIR, call, timeout_s)
        sender = PromptSender(self._prompts, self.address, call)
        while True:
            try:
                answer = await self._connection.call(methods.PAIR, sender.next(), timeout_s)
            except (UnknownPromptError, InvalidRequestError) as error:
                sender.note_error(error)
            else:
                sender.note_answer()
                return answer

    async def settle(self, settlement: Settlement, *, timeout_s: float | None = DEFAULT_TIMEOUT_S) -> None:
        await self._connection.call(methods.SETTLE, settlement, timeout_s)

    async def describe(self, *, timeout_s: float | None = DEFAULT_TIMEOUT_S) -> ProcessInfo:
        return await self._connection.call(methods.DESCRIBE, None, timeout_s)

    async def models(self, *, timeout_s: float | None = DEFAULT_TIMEOUT_S) -> Sequence[ModelInfo]:
        return await self._connection.call(methods.MODELS, None, timeout_s)

    async def workers(self, *, timeout_s: float | None = DEFAULT_TIMEOUT_S) -> Sequence[WorkerListing]:
        return await self._connection.call(methods.WORKERS, None, timeout_s)

    async def decisions(self, num_latest: int, *, timeout_s: float | None = DEFAULT_TIMEOUT_S) -> Sequence[Decision]:
        return await self._connection.call(methods.DECISIONS, num_latest, timeout_s)

    async def register(
        self, registration: Registration, *, timeout_s: float | None = DEFAULT_TIMEOUT_S
    ) -> Sequence[WorkerRecord]:
        return await self._connection.call(methods.REGISTER, registration, timeout_s)

    async def unregister(self, worker: WorkerRecord, *, timeout_s: float | None = DEFAULT_TIMEOUT_S) -> None:
        await self._connection.call(methods.UNREGISTER, worker, timeout_s)

    async def publish(
        self,
        worker_id: str,
        epoch: int,
        events: Sequence[BlockEvent],
        sequence: int,
        *,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
    ) -> PublishResult:
        report = BlockReport(worker_id, epoch, events, sequence)
        return await self._connection.call(methods.PUBLISH, report, timeout_s)

    async def replace(
        self,
        worker_id: str,
        epoch: int,
        hashes: Sequence[bytes],
        sequence: int,
        *,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
    ) -> PublishResult:
        snapshot = BlockSnapshot(worker_id, epoch, hashes, sequence)
        return await self._connection.call(methods.REPLACE, snapshot, timeout_s)


class Pooled(Protocol):
    """Requirements of `ClientPool` on a client."""

    @property
    def is_idle(self) -> bool: ...

    async def close(self) -> None: ...


C = TypeVar("C", bound=Pooled)


class ClientPool(Generic[C]):
    """Clients by address; beyond `max_clients`, the least recently used idle ones are closed.

    Args:
        connect: creates the client of an address, as `WorkerClient` does.
        max_clients: maximum number of clients; busy ones are kept beyond it.
    """

    def __init__(self, connect: Callable[[str], C], max_clients: int = DEFAULT_MAX_CLIENTS) -> None:
        self._connect = connect
        self._max_clients = max_clients
        self._clients: OrderedDict[str, C] = OrderedDict()
        self._closing: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._clients)

    def get(self, address: str) -> C:
        """The client of `address`, for immediate use: once idle, it may be closed. Must be called in the event loop."""
        client = self._clients.pop(address, None) or self._connect(address)
        self._clients[address] = client
        if len(self._clients) > self._max_clients:
            self._drop_idle()
        return client

    async def close(self) -> None:
        """Close all clients."""
        clients = list(self._clients.values())
        self._clients.clear()
        await asyncio.gather(*(client.close() for client in clients), *self._closing)

    def _drop_idle(self) -> None:
        """Closes the least recently used idle client. NOTE: never the newest, which is about to be used."""
        oldest_first = list(self._clients)[:-1]
        address = next((one for one in oldest_first if self._clients[one].is_idle), None)
        if address is not None:
            _close_in_background(self._clients.pop(address).close(), self._closing)


def _incarnation(worker: WorkerAddress | None) -> str:
    return "" if worker is None else worker.incarnation


def _close_in_background(closing: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> None:
    """Closes a client in a task, which `tasks` references until it is done."""
    task = asyncio.get_running_loop().create_task(closing)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
