"""Reads a request's body off the wire.

Invariant: never holds more than the limit, nor waits longer; a client that leaves is noticed.
"""

import asyncio

from starlette.types import Receive

from tandem.gateway.errors import RequestError

BODY_TIMEOUT_S = 60.0


class ClientLeftError(ConnectionError):
    """The client closed its connection; there is nobody to answer."""


async def read_body(receive: Receive, declared: str | None, max_bytes: int) -> bytes:
    """The whole body.

    Args:
        declared: the content-length header.

    Raises:
        RequestError: it is longer than `max_bytes`, or takes longer than `BODY_TIMEOUT_S`.
        ClientLeftError: it did not come to its end.
    """
    if declared is not None and declared.isascii() and declared.isdecimal() and int(declared[:20]) > max_bytes:
        raise _too_long(max_bytes)
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await _read(receive, max_bytes)
    except TimeoutError as error:
        raise RequestError(
            f"the body did not come to its end within {BODY_TIMEOUT_S:g} s; send it faster, or less of it",
            code="request_timeout",
            status=408,
        ) from error


async def _read(receive: Receive, max_bytes: int) -> bytes:
    chunks: list[bytes] = []
    num_bytes = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeftError("the client left while it sent its request")
        chunk = message.get("body", b"")
        num_bytes += len(chunk)
        if num_bytes > max_bytes:
            raise _too_long(max_bytes)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


async def wait_until_left(receive: Receive) -> None:
    """Returns when the client closes its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _too_long(max_bytes: int) -> RequestError:
    return RequestError(f"the body is longer than {max_bytes} bytes", code="request_too_large", status=413)
