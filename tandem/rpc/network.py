"""Interface of the transport under remote calls: gRPC by default, or one set in a context, such as the simulation's.

A network encodes requests and answers by the methods' forms, turns failures into errors of `core.errors` as
`grpc_connection` and `status` do, and cancels a handler whose caller has left.
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
    """A connection to one address, as implemented by `grpc_connection.GrpcConnection`."""

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
    """Registry of a service's methods, each with the function that answers its calls."""

    def unary(self, method: Method[Q, A], respond: Callable[[Q], Awaitable[A]]) -> None: ...

    def stream(self, method: Method[Q, A], respond: Callable[[Q], AsyncIterator[A]]) -> None: ...

    def bidirectional(self, method: Method[Q, A], respond: Callable[[AsyncIterator[Q]], AsyncIterator[A]]) -> None: ...


class RpcServer(Protocol):
    """A running server. `port`: the one it listens at, also if it was asked for port 0."""

    port: int
    address: str

    async def stop(self, grace_s: float = 0.0) -> None:
        """Refuses new calls, waits up to `grace_s` seconds for running ones, then cancels them."""
        ...


class Network(Protocol):
    """Transports calls between processes."""

    def connect(
        self, address: str, credentials: Credentials, expected: Expected, metadata_source: MetadataSource | None
    ) -> RpcConnection:
        """Opens a connection to the process at `address`; see `RpcConnection`."""
        ...

    async def serve(self, fill: Callable[[MethodTable], None], bind: str, credentials: Credentials) -> RpcServer:
        """Serves the methods registered by `fill` at `bind` (host:port) to callers that open a session.

        Raises:
            ConfigurationError: the address is taken.
        """
        ...


current_network: ContextVar[Network | None] = ContextVar("current_network", default=None)
