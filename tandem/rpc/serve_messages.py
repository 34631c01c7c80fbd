"""Messages of the stream that a caller's requests share, in place of a call for each (`shared_stream`)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class RequestStart:
    """Start of a request.

    Args:
        number: identifies the request on this stream; never reused.
        call: the encoded `GenerateCall`; errors in it concern this request alone.
        traceparent: its W3C trace header; empty = none.
        credit: number of tokens that may be sent before more credit is granted.
    """

    number: int
    call: bytes
    traceparent: str
    credit: int


class Credit(NamedTuple):
    """Flow control: permits `num_tokens` more tokens of a request."""

    number: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class ServeCall:
    """Message to the worker: requests that start, credits, and `left`, the numbers of cancelled requests."""

    starts: tuple[RequestStart, ...] = ()
    credits: tuple[Credit, ...] = ()
    left: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class CallStatus:
    """Status with which a request ended, as that of a gRPC call. `code`: gRPC's number; 0 = success."""

    code: int = 0
    details: str = ""
    trailing: Mapping[str, str] = field(default_factory=dict)


class TextUpdate(NamedTuple):
    """Update of a request with tokens and their text, and nothing else."""

    number: int
    token_ids: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True)
class OtherUpdate:
    """Any other update of a request. `update`: an encoded `GenerateUpdate`, or empty. `status`: None while it runs."""

    number: int
    update: bytes = b""
    status: CallStatus | None = None


@dataclass(frozen=True, slots=True)
class ServeUpdate:
    """Updates of many requests, at most one text update of each."""

    plain: tuple[TextUpdate, ...] = ()
    others: tuple[OtherUpdate, ...] = ()
