"""Parses server-sent events from chunks that may end anywhere. Knows lines and fields, no JSON.

Invariant: at most one event of `MAX_EVENT_BYTES` is buffered.
"""

from collections.abc import Iterator

from tandem.loadtest.failure import MALFORMED, ExchangeError

MAX_EVENT_BYTES = 16 << 20  # of one event
_BLANK = b"\n\n"


class EventReader:
    """Takes chunks and yields the data of each complete event."""

    def __init__(self) -> None:
        self._rest = b""

    @property
    def is_empty(self) -> bool:
        """Whether no part of an unfinished event is buffered."""
        return not self._rest.strip()

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """The events that `chunk` completes.

        Raises:
            ExchangeError: a line is no field of an event, or an event has no end.
        """
        whole = self._rest + chunk if self._rest else chunk
        if b"\r" in whole:  # NOTE: a chunk may end between the two characters of a line's end
            kept, whole = (b"\r", whole[:-1]) if whole.endswith(b"\r") else (b"", whole)
            whole = whole.replace(b"\r\n", b"\n").replace(b"\r", b"\n") + kept
        *events, self._rest = whole.split(_BLANK)
        if len(self._rest) > MAX_EVENT_BYTES:
            raise ExchangeError(MALFORMED, f"an event is longer than {MAX_EVENT_BYTES} bytes")
        for event in events:
            data = _data(event)
            if data is not None:
                yield data


def _data(event: bytes) -> bytes | None:
    """The data field; None for an event without one, as a comment that keeps a connection open."""
    if event.startswith(b"data: ") and b"\n" not in event:
        return event[6:]
    found: list[bytes] = []
    for line in filter(None, event.split(b"\n")):
        name, colon, value = line.partition(b":")
        if not colon or name not in (b"data", b"event", b"id", b"retry", b""):
            raise ExchangeError(MALFORMED, f"{line[:80]!r} is no line of an event")
        if name == b"data":
            found.append(value.removeprefix(b" "))
    return b"\n".join(found) if found else None
