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
MetadataSource = Callable[[], Sequence[tuple[str, str]]]  # called at the start of each call; returns its headers


class RpcConnection(Protocol):
    """A connection to one address; its methods are described at `grpc_connection.GrpcConnection`. `num_calls`: running
    ones, without those of `bidirectional`. `channel_number`: changes when later calls go over another transport
    connection.
    """

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
    """Registry of a service's methods, each with the function that answers its calls: with one answer, a stream of
    answers, or streams both ways.
    """

    def unary(self, method: Method[Q, A], respond: Callable[[Q], Awaitable[A]]) -> None: ...

    def stream(self, method: Method[Q, A], respond: Callable[[Q], AsyncIterator[A]]) -> None: ...

    def bidirectional(self, method: Method[Q, A], respond: Callable[[AsyncIterator[Q]], AsyncIterator[A]]) -> None: ...


class RpcServer(Protocol):
    """A running server. `port`: the one it listens at, also if it was asked for port 0; `address`: host:port at which
    others call it.
    """

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
        """Returns at once a connection to the process at `address` (host:port), which connects when first used."""
        ...

    async def serve(self, fill: Callable[[MethodTable], None], bind: str, credentials: Credentials) -> RpcServer:
        """Serves the methods registered by `fill` at `bind` (host:port) to callers that open a session.

        Raises:
            ConfigurationError: the address is taken.
        """
        ...


current_network: ContextVar[Network | None] = ContextVar("current_network", default=None)  # None = gRPC
