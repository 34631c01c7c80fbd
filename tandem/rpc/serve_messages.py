"""Messages of a stream that many requests share, as `messages` are for calls of their own. Plain values."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Opening:
    """A request that begins.

    Args:
        number: its name on this stream, never used twice.
        call: the encoded `GenerateCall`; what is wrong with it concerns this request alone.
        traceparent: of the trace it belongs to; empty = none.
        room: tokens that may be sent before more room is made.
    """

    number: int
    call: bytes
    traceparent: str
    room: int


class Room(NamedTuple):
    """The caller has taken so many tokens of a request."""

    number: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class ServeCall:
    """What the caller has to say. `left`: numbers of requests of which it wants no more."""

    openings: tuple[Opening, ...] = ()
    rooms: tuple[Room, ...] = ()
    left: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Ending:
    """How a request ended, as the status of a call of its own would say. `code`: gRPC's; 0 = as it should."""

    code: int = 0
    details: str = ""
    trailing: Mapping[str, str] = field(default_factory=dict)


class Plain(NamedTuple):
    """Tokens and their text, and nothing else that is new of a request."""

    number: int
    token_ids: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Delivery:
    """Any other update of a request. `update`: an encoded `GenerateUpdate`; empty = none. None: it goes on."""

    number: int
    update: bytes = b""
    ending: Ending | None = None


@dataclass(frozen=True, slots=True)
class ServeUpdate:
    """What is new of many requests, at most once of each."""

    plain: tuple[Plain, ...] = ()
    others: tuple[Delivery, ...] = ()
