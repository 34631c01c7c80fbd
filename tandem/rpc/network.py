"""The seam between our calls and what carries them: gRPC by default, or what the context of a task names instead.

A network carries whole calls: it encodes requests and answers by the methods' forms, turns failures into errors of
`core.errors` as `grpc_connection` and `status` do, and cancels a handler whose caller has gone. A simulation is one.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextvars import ContextVar
from typing import Protocol, TypeVar

from tandem.rpc.credentials import Credentials
from tandem.rpc.methods import Method
from tandem.rpc.session import Expected

Q = TypeVar("Q")
A = TypeVar("A")
MetadataSource = Callable[[], Sequence[tuple[str, str]]]


class RpcConnection(Protocol):
    """A connection to one address; see `grpc_connection.GrpcConnection`, which is one."""

    address: str
    num_calls: int

    async def call(self, method: Method[Q, A], request: Q, timeout_s: float | None) -> A: ...

    def stream(
        self, method: Method[Q, A], request: Q, timeout_s: float | None, incarnation: str = ""
    ) -> AsyncGenerator[A, None]: ...

    def bidirectional(self, method: Method[Q, A], requests: AsyncIterator[Q]) -> AsyncGenerator[A, None]: ...

    async def require(self, method: Method[Q, A], incarnation: str) -> None: ...

    async def close(self) -> None: ...

    @property
    def channel_number(self) -> int: ...

    @property
    def own_metadata(self) -> Sequence[tuple[str, str]]: ...


class MethodTable(Protocol):
    """Takes what answers each method of one service."""

    def unary(self, method: Method[Q, A], respond: Callable[[Q], Awaitable[A]]) -> None: ...

    def stream(self, method: Method[Q, A], respond: Callable[[Q], AsyncIterator[A]]) -> None: ...

    def bidirectional(self, method: Method[Q, A], respond: Callable[[AsyncIterator[Q]], AsyncIterator[A]]) -> None: ...


class RpcServer(Protocol):
    """A server that runs. `port` is the one it got, where it was asked for port 0."""

    port: int
    address: str

    async def stop(self, grace_s: float = 0.0) -> None:
        """Refuse new calls, give those that run `grace_s`, then cancel them."""
        ...


class Network(Protocol):
    """Carries calls between processes."""

    def connect(
        self, address: str, credentials: Credentials, expected: Expected, metadata_source: MetadataSource | None
    ) -> RpcConnection: ...

    async def serve(self, fill: Callable[[MethodTable], None], bind: str, credentials: Credentials) -> RpcServer:
        """Serve the methods that `fill` enters, at `bind` (host:port), to those who open a session.

        Raises:
            ConfigurationError: it is taken.
        """
        ...


current_network: ContextVar[Network | None] = ContextVar("current_network", default=None)
