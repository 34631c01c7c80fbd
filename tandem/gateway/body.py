"""Reads requests' bodies off the wire.

Invariant: never holds more than the limit of one, nor than that of all together, nor waits longer; a client that leaves
is noticed.
"""

import asyncio
from contextlib import ExitStack
from types import TracebackType

from starlette.types import Receive

from tandem.core.errors import CapacityError
from tandem.core.memory import total_bytes
from tandem.gateway.errors import RequestError

BODY_TIMEOUT_S = 60.0
MAX_HELD_BYTES = 512 * 2**20
SMALL_BYTES = 64 * 1024  # of each body that do not count, so that large ones keep no small one out


class ClientLeftError(ConnectionError):
    """The client closed its connection; there is nobody to answer."""


class Bodies:
    """The bodies that a gateway holds. Owned by one event loop.

    Args:
        max_bytes: of one.
        max_held_bytes: of all that are not freed yet.
    """

    def __init__(self, max_bytes: int, max_held_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.max_held_bytes = max_held_bytes
        self.num_held_bytes = 0

    @classmethod
    def for_this_machine(cls, max_bytes: int) -> "Bodies":
        """Together at most a quarter of the memory there is, but always one."""
        return cls(max_bytes, max(max_bytes, min(MAX_HELD_BYTES, total_bytes() // 4)))

    async def read(self, receive: Receive, declared: str | None) -> "Body":
        """The whole body, which is its reader's to free.

        Args:
            declared: the content-length header.

        Raises:
            RequestError: it is longer than `max_bytes`, or takes longer than `BODY_TIMEOUT_S`.
            CapacityError: too much is held already.
            ClientLeftError: it did not come to its end.
        """
        if declared is not None and declared.isascii() and declared.isdecimal() and int(declared[:20]) > self.max_bytes:
            raise _too_long(self.max_bytes)
        with ExitStack() as undo:
            body = undo.enter_context(Body(self))
            try:
                async with asyncio.timeout(BODY_TIMEOUT_S):
                    await self._read(receive, body)
            except TimeoutError as error:
                raise RequestError(
                    f"the body did not come to its end within {BODY_TIMEOUT_S:g} s; send it faster, or less of it",
                    code="request_timeout",
                    status=408,
                ) from error
            undo.pop_all()
            return body

    async def _read(self, receive: Receive, body: "Body") -> None:
        data = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientLeftError("the client left while it sent its request")
            data += message.get("body", b"")
            if len(data) > self.max_bytes:
                raise _too_long(self.max_bytes)
            body.count(len(data))
            if self.num_held_bytes > self.max_held_bytes:
                raise CapacityError("this gateway holds as many bytes of requests as it may; try again", 1.0)
            if not message.get("more_body", False):
                body.data = bytes(data)
                return


class Body:
    """One body, as a context: held until it is freed, which may be done again."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._num_counted = 0
        self.data = b""

    def count(self, num_bytes: int) -> None:
        """There are so many now."""
        num_counted = max(0, num_bytes - SMALL_BYTES)
        self._bodies.num_held_bytes += num_counted - self._num_counted
        self._num_counted = num_counted

    def free(self) -> None:
        self.count(0)
        self.data = b""

    def __enter__(self) -> "Body":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.free()


async def wait_until_left(receive: Receive) -> None:
    """Returns when the client closes its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _too_long(max_bytes: int) -> RequestError:
    return RequestError(f"the body is longer than {max_bytes} bytes", code="request_too_large", status=413)
