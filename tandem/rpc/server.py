"""gRPC server of a worker's or router's methods (`handlers`); sends the errors they raise to their callers.

Every call is checked before it reaches its method: the caller's identity, its role's permission, the message. When the
caller leaves, the method is cancelled and its generator closed before anything else happens to the call.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Generic, NoReturn, Protocol, TypeVar

import grpc

from tandem.core.errors import (
    ConfigurationError,
    IncompatibleProtocolError,
    UntrustedPeerError,
    WorkerLostError,
    shown,
)
from tandem.rpc import methods
from tandem.rpc.caller_watch import CallerWatch
from tandem.rpc.channel import SERVER_OPTIONS
from tandem.rpc.context import incoming_traceparent
from tandem.rpc.credentials import Credentials
from tandem.rpc.encryption import add_port, check_caller
from tandem.rpc.handlers import RouterHandler, WorkerHandler
from tandem.rpc.messages import GenerateCall, GenerateUpdate, PairCall, PairingAnswer
from tandem.rpc.methods import Method
from tandem.rpc.network import MethodTable, RpcServer, current_network
from tandem.rpc.prompt_reuse import RememberedPrompts
from tandem.rpc.protocols import SPOKEN, described
from tandem.rpc.session_messages import OpenAnswer, OpenCall
from tandem.rpc.session_table import NotAdmittedError, SessionTable
from tandem.rpc.shared_service import SharedService
from tandem.rpc.status import (
    ADMITTED,
    FORMER_VERSION_KEY,
    PROOF_KEY,
    TRACE_KEY,
    code_of,
    details_of,
    metadata_of,
)

Q = TypeVar("Q")
A = TypeVar("A")
_COMPLAINT_INTERVAL_S = 60.0  # NOTE: a refused process calls again every second, or at each request
logger = logging.getLogger(__name__)


class _Context(Protocol):
    """Part of `grpc.aio.ServicerContext` that is used here."""

    def auth_context(self) -> Mapping[str, Sequence[bytes]]: ...

    def invocation_metadata(self) -> tuple[tuple[str, str | bytes], ...] | None: ...

    async def send_initial_metadata(self, initial_metadata: object) -> None: ...

    async def write(self, message: bytes) -> None: ...

    def cancelled(self) -> bool: ...

    def peer(self) -> str: ...

    async def abort(self, code: grpc.StatusCode, details: str, trailing_metadata: object) -> NoReturn: ...


class _GrpcServer:
    """`RpcServer` over gRPC."""

    def __init__(self, server: grpc.aio.Server, host: str, port: int) -> None:
        self._server = server
        self._watching: asyncio.Task[None] | None = None
        self.port = port
        self.address = f"{host}:{port}"

    async def start(self, watch: CallerWatch) -> None:
        """Begins to answer calls, and watches the callers' certificates until it stops."""
        self._watching = asyncio.create_task(watch.run(), name=f"watch callers of {self.address}")
        await self._server.start()

    async def stop(self, grace_s: float = 0.0) -> None:
        await self._server.stop(grace_s)
        if self._watching is not None:
            self._watching.cancel()


async def serve_worker(
    handler: WorkerHandler, bind: str, credentials: Credentials, *, is_shared: bool = True
) -> RpcServer:
    """Serves a worker's methods at `bind` (host:port; port 0 = any).

    Args:
        credentials: of this process; an empty address is replaced by `bind` with its port.
        is_shared: False = every request has a call of its own, as with workers of older versions.

    Raises:
        ConfigurationError: `bind` is taken or is no address of this machine.
    """
    return await _serve(methods.WORKER_SERVICE, partial(fill_worker, handler, is_shared), bind, credentials)


async def serve_router(handler: RouterHandler, bind: str, credentials: Credentials) -> RpcServer:
    """Serves a router's methods at `bind`; as `serve_worker`."""
    return await _serve(methods.ROUTER_SERVICE, partial(fill_router, handler), bind, credentials)


def fill_worker(handler: WorkerHandler, is_shared: bool, table: MethodTable) -> None:
    """Registers the methods of a worker."""
    table.unary(methods.STATUS, lambda _: handler.status())
    table.stream(methods.WATCH, handler.watch)
    table.unary(methods.DRAIN, lambda _: handler.drain())
    prompts = RememberedPrompts()

    def generate(call: GenerateCall) -> AsyncIterator[GenerateUpdate]:
        return handler.generate(prompts.whole(call))

    table.stream(methods.GENERATE, generate)
    if is_shared:
        table.bidirectional(methods.SERVE, lambda calls: SharedService(generate).respond(calls))
    table.stream(methods.PREFILL, lambda call: handler.prefill(prompts.whole(call)))
    table.unary(methods.GREET, handler.greet)
    table.unary(methods.LEASE, handler.lease)
    table.unary(methods.RENEW, handler.renew)
    table.unary(methods.CONFIRM, handler.confirm)
    table.unary(methods.RELEASE, handler.release)


def fill_router(handler: RouterHandler, table: MethodTable) -> None:
    """Registers the methods of a router."""
    prompts = RememberedPrompts()

    async def pair(call: PairCall) -> PairingAnswer:
        return await handler.pair(prompts.whole(call))

    table.unary(methods.PAIR, pair)
    table.unary(methods.SETTLE, handler.settle)
    table.unary(methods.DESCRIBE, lambda _: handler.describe())
    table.unary(methods.MODELS, lambda _: handler.models())
    table.unary(methods.WORKERS, lambda _: handler.workers())
    table.unary(methods.DECISIONS, handler.decisions)
    table.unary(methods.REGISTER, handler.register)
    table.unary(methods.UNREGISTER, handler.unregister)
    table.unary(methods.PUBLISH, lambda call: handler.publish(call.worker_id, call.epoch, call.events, call.sequence))
    table.unary(
        methods.REPLACE,
        lambda call: handler.replace(call.worker_id, call.epoch, call.block_hashes, call.sequence),
    )


async def _serve(name: str, fill: Callable[[MethodTable], None], bind: str, credentials: Credentials) -> RpcServer:
    network = current_network.get()
    if network is not None:
        return await network.serve(fill, bind, credentials)
    server, service, opener = grpc.aio.server(options=SERVER_OPTIONS), _Service(name), _Service(methods.SESSION_SERVICE)
    fill(service)
    opener.open()
    server.add_generic_rpc_handlers(
        (service, grpc.method_handlers_generic_handler(methods.SESSION_SERVICE, opener.handlers))
    )
    try:
        port = add_port(server, bind, credentials.tls)
    except RuntimeError as error:
        raise ConfigurationError(
            f"cannot listen on {bind}: it is taken or not an address of this machine; choose another"
        ) from error
    running = _GrpcServer(server, bind.rpartition(":")[0], port)
    if not credentials.address:
        credentials = replace(credentials, address=running.address)
    service.sessions = opener.sessions = SessionTable(credentials)
    service.watch = opener.watch = CallerWatch(credentials.tls, service.sessions)
    opener.credentials = credentials
    await running.start(service.watch)
    return running


class _Service(grpc.GenericRpcHandler):
    """Methods of one service, each with the same checks and error handling.

    NOTE: gRPC reads the request of a unary method before its handler is asked. So that strangers cannot fill the memory
    with large ones, calls that belong to no session get a handler that reads none.
    """

    sessions: SessionTable
    watch: CallerWatch
    credentials: Credentials

    def __init__(self, name: str) -> None:
        self._complaints = _Complaints()
        self._prefix = f"/{name}/"
        self.handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {}
        self._refusals: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {}

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[bytes, bytes] | None":
        """The handler of a call; None if there is no such method."""
        if not handler_call_details.method.startswith(self._prefix):
            return None
        name = handler_call_details.method.removeprefix(self._prefix)
        proof = dict(handler_call_details.invocation_metadata or ()).get(PROOF_KEY, "")
        return (self.handlers if self.sessions.knows(_text(proof)) else self._refusals).get(name)

    def open(self) -> None:
        """Registers the method that answers handshakes, which carry their own proofs."""
        method: Method[OpenCall, OpenAnswer] = methods.OPEN

        async def serve(data: bytes, context: _Context) -> bytes:
            call = _Call(method, context, self._complaints)
            try:
                asked = call.read(data)
                check_caller(context, asked.party.role, self.credentials)
                return method.encode_answer(self.sessions.open(asked, self.watch.accepted(context)))
            except (Exception, asyncio.CancelledError) as error:  # NOTE: as below
                await call.fail(error)

        self.handlers[method.name] = grpc.unary_unary_rpc_method_handler(serve)

    def unary(self, method: Method[Q, A], respond: Callable[[Q], Awaitable[A]]) -> None:
        """Registers a method with one answer."""

        async def serve(data: bytes, context: _Context) -> bytes:
            call = _Call(method, context, self._complaints)
            try:
                self._admit(method, data, context)
                return method.encode_answer(await respond(call.read(data)))
            except (
                Exception,
                asyncio.CancelledError,
            ) as error:  # NOTE: whatever a handler raises is sent to its caller
                await call.fail(error)

        self._add(method, grpc.unary_unary_rpc_method_handler(serve))

    def stream(self, method: Method[Q, A], respond: Callable[[Q], AsyncIterator[A]]) -> None:
        """Registers a method with a stream of answers."""

        async def serve(data: bytes, context: _Context) -> None:
            call = _Call(method, context, self._complaints)
            try:
                self._admit(method, data, context)
                async with self.watch.running(context):
                    await _write_all(method, respond(call.read(data)), context)
            except (Exception, asyncio.CancelledError) as error:  # NOTE: as above
                await call.fail(error)

        self._add(method, grpc.unary_stream_rpc_method_handler(serve))

    def bidirectional(self, method: Method[Q, A], respond: Callable[[AsyncIterator[Q]], AsyncIterator[A]]) -> None:
        """Registers a method with streams of requests and answers."""

        async def serve(data: AsyncIterator[bytes], context: _Context) -> None:
            call = _Call(method, context, self._complaints)
            try:
                self._admit(method, b"", context)
                async with self.watch.running(context):
                    await context.send_initial_metadata((ADMITTED,))
                    await _write_all(method, respond(call.read_all(data)), context)
            except (Exception, asyncio.CancelledError) as error:  # NOTE: as above
                await call.fail(error)

        self._add(method, grpc.stream_stream_rpc_method_handler(serve))

    def _add(self, method: Method[Q, A], handler: "grpc.RpcMethodHandler[bytes, bytes]") -> None:
        async def refuse(_: AsyncIterator[bytes], context: _Context) -> None:
            call = _Call(method, context, self._complaints)
            try:
                self._admit(method, b"", context)
                raise WorkerLostError(f"{method.name} belongs to a session that was opened after it")
            except (Exception, asyncio.CancelledError) as error:  # NOTE: as above
                await call.fail(error)

        self.handlers[method.name] = handler
        self._refusals[method.name] = grpc.stream_stream_rpc_method_handler(refuse)

    def _admit(self, method: Method[Q, A], body: bytes, context: _Context) -> None:
        metadata = dict(context.invocation_metadata() or ())
        proof = metadata.get(PROOF_KEY, "")
        if not proof and FORMER_VERSION_KEY in metadata:
            raise IncompatibleProtocolError(
                f"the caller speaks protocol {shown(metadata[FORMER_VERSION_KEY])}, this process {described(SPOKEN)}; "
                "run releases of Tandem that are at most one apart"
            )
        self.sessions.admit(_text(proof), method.path, body)
        traceparent = metadata.get(TRACE_KEY)
        incoming_traceparent.set(traceparent if isinstance(traceparent, str) else None)


class _Complaints:
    """Logs refused callers: at most one a minute for each reason."""

    def __init__(self) -> None:
        self._next_s: dict[str, float] = {}

    def note(self, caller: str, error: Exception) -> None:
        """Logs `error` unless its class and code were logged within the last minute."""
        kind = f"{type(error).__name__} {getattr(error, 'code', '')}"
        if time.monotonic() >= self._next_s.get(kind, 0.0):
            self._next_s[kind] = time.monotonic() + _COMPLAINT_INTERVAL_S
            logger.error("a process at %s is refused until this is mended: %s", caller, error)


class _Call(Generic[Q, A]):
    """One call: reads its request, and ends it with an error's status."""

    def __init__(self, method: Method[Q, A], context: _Context, complaints: _Complaints) -> None:
        self._method = method
        self._context = context
        self._complaints = complaints
        self._request_id = "-"

    def read(self, data: bytes) -> Q:
        request = self._method.request.decode(data)
        self._request_id = getattr(request, "request_id", "-")
        return request

    async def read_all(self, requests: AsyncIterator[bytes]) -> AsyncIterator[Q]:
        async for data in requests:
            yield self._method.request.decode(data)

    async def fail(self, error: Exception | asyncio.CancelledError) -> NoReturn:
        """Ends the call with `error` if the caller is still there. Unexpected errors are bugs, so they are logged."""
        task = asyncio.current_task()
        if self._context.cancelled() or (task is not None and task.cancelling()):
            raise asyncio.CancelledError from error
        if isinstance(error, asyncio.CancelledError):  # NOTE: not the caller's doing; gRPC would leave it waiting
            error = WorkerLostError(f"{self._method.name} was cancelled by the process that served it")
        if isinstance(error, NotAdmittedError):
            if not error.is_forgotten:
                self._complaints.note(self._context.peer(), error)
            await self._context.abort(error.code, str(error), error.trailing)
        if isinstance(error, IncompatibleProtocolError | UntrustedPeerError):
            self._complaints.note(self._context.peer(), error)
        code = code_of(error)
        if code is grpc.StatusCode.INTERNAL:
            logger.error("%s failed; request %s", self._method.name, self._request_id, exc_info=error)
        await self._context.abort(code, details_of(error), metadata_of(error))


async def _write_all(method: Method[Q, A], answers: AsyncIterator[A], context: _Context) -> None:
    try:
        async for answer in answers:
            await context.write(method.encode_answer(answer))
    finally:
        close = getattr(answers, "aclose", None)
        if close is not None:
            await close()


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else ""
