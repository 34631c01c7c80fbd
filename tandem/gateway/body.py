"""Reads JSON bodies of requests and counts the memory that they take, raw and later parsed, against limits.

Invariant: the bytes counted stay within the limits of one body, of one API key and of the whole gateway; reading ends
within `BODY_TIMEOUT_S`; a disconnect is noticed.
"""

import asyncio
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from io import BytesIO
from types import TracebackType

from starlette.types import Receive, Scope

from tandem.core.errors import CapacityError
from tandem.core.memory import total_bytes
from tandem.gateway.accounts import caller_of
from tandem.gateway.content_type import check_codings, check_content_type
from tandem.gateway.edge import header_of
from tandem.gateway.errors import RequestError
from tandem.gateway.json_scan import VALUE_BYTES, JsonScan, check_scan

BODY_TIMEOUT_S = 60.0  # from the request's head to the end of its body
# Most that all bodies together may take, raw and parsed, however much memory the machine has.
MAX_HELD_BYTES = 512 * 2**20
SMALL_BYTES = 64 * 1024  # of each body are not counted, so that large bodies never keep small ones out
_SCANNED_BYTES = 64 * 1024  # scanned at once, which takes a fraction of a millisecond
_KEYS_SHARE = 4  # one API key's bodies may take the limit of all bodies divided by this


class ClientLeftError(ConnectionError):
    """The client closed its connection, so no answer can be sent."""


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Limits of one body: its bytes, its JSON values and its object members, as `JsonScan` counts them."""

    max_bytes: int
    max_values: int
    max_members: int

    @property
    def max_charge(self) -> int:
        """Bytes charged for the largest body allowed."""
        return self.max_bytes + VALUE_BYTES * (self.max_values + self.max_members)


class Bodies:
    """The request bodies that a gateway holds. Owned by one event loop.

    Args:
        limits: of one body.
        max_held_bytes: of all bodies that are not freed yet.
        max_key_bytes: of the bodies of one API key.
    """

    def __init__(self, limits: BodyLimits, max_held_bytes: int, max_key_bytes: int) -> None:
        self.limits = limits
        self.max_held_bytes = max_held_bytes
        self.max_key_bytes = max_key_bytes
        self.num_held_bytes = 0
        self.num_key_bytes: Counter[str] = Counter()

    @classmethod
    def for_this_machine(cls, limits: BodyLimits) -> "Bodies":
        """Limits for this machine: all bodies may take a quarter of its memory, but at most `MAX_HELD_BYTES`; one key a
        quarter of that. One body of the largest size always fits.
        """
        max_held_bytes = max(limits.max_charge, min(MAX_HELD_BYTES, total_bytes() // 4))
        return cls(limits, max_held_bytes, max(limits.max_charge, max_held_bytes // _KEYS_SHARE))

    async def read(self, receive: Receive, scope: Scope) -> "Body":
        """Reads the whole body of a request; the caller must free it.

        Raises:
            RequestError: it is not declared as JSON, is compressed, exceeds the limits, or takes longer than
                `BODY_TIMEOUT_S`.
            CapacityError: too many bytes are held already.
            ClientLeftError: the client left before its end.
        """
        check_content_type(scope)
        check_codings(scope)
        self._check_declared(header_of(scope, b"content-length"))
        key = caller_of(scope).key
        with ExitStack() as undo:
            body = undo.enter_context(Body(self, None if key is None else key.key_id))
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

    def _check_declared(self, declared: str | None) -> None:
        most = self.limits.max_bytes
        if declared is not None and declared.isascii() and declared.isdecimal() and int(declared[:20]) > most:
            raise _too_long(most)

    async def _read(self, receive: Receive, body: "Body") -> None:
        data, scan = BytesIO(), JsonScan()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientLeftError("the client left while it sent its request")
            piece = message.get("body", b"")
            data.write(piece)
            if data.tell() > self.limits.max_bytes:
                raise _too_long(self.limits.max_bytes)
            for start in range(0, len(piece), _SCANNED_BYTES):
                if start:
                    await asyncio.sleep(0)
                scan.feed(piece[start : start + _SCANNED_BYTES])
                check_scan(scan, self.limits.max_values, self.limits.max_members)
            body.charge(data.tell() + scan.num_bytes)
            self._check_held(body)
            if not message.get("more_body", False):
                body.data = data.getvalue()
                return

    def _check_held(self, body: "Body") -> None:
        if self.num_held_bytes > self.max_held_bytes:
            raise CapacityError("this gateway holds as many bytes of requests as it may; try again", 1.0)
        if body.key_id is not None and self.num_key_bytes[body.key_id] > self.max_key_bytes:
            raise CapacityError(
                f"the requests of this API key that are being read take more than {self.max_key_bytes} bytes of "
                "memory; send fewer large ones at once",
                1.0,
            )


class Body:
    """A request's body, as context manager: counted until `free`, which is idempotent. `key_id`: charged API key."""

    def __init__(self, bodies: Bodies, key_id: str | None = None) -> None:
        self._bodies = bodies
        self._num_charged = 0
        self.key_id = key_id
        self.data = b""

    def charge(self, num_bytes: int) -> None:
        """Sets the bytes charged for this body; the first `SMALL_BYTES` are free."""
        num_charged = max(0, num_bytes - SMALL_BYTES)
        more = num_charged - self._num_charged
        self._num_charged = num_charged
        self._bodies.num_held_bytes += more
        if self.key_id is not None:
            self._bodies.num_key_bytes[self.key_id] += more
            if not self._bodies.num_key_bytes[self.key_id]:
                del self._bodies.num_key_bytes[self.key_id]

    def free(self) -> None:
        self.charge(0)
        self.data = b""

    def __enter__(self) -> "Body":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.free()


async def wait_until_left(receive: Receive) -> None:
    """Returns when the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _too_long(max_bytes: int) -> RequestError:
    return RequestError(f"the body is longer than {max_bytes} bytes", code="request_too_large", status=413)
