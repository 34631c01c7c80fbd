"""Calls of a leader about the KV of another host, and their answers. Both have the number of the call."""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass

from tandem.compute.page_bytes import NumberParts, PagePart


@dataclass(frozen=True, slots=True)
class OpenPool:
    """Let peers read the KV of this host's ranks, as this incarnation of a worker. The numbers are those of a
    `MemoryPool`.
    """

    incarnation: str
    compatibility: Mapping[str, str]
    page_bytes: int
    num_blocks: int
    num_ranks: int
    piece_bytes: int | None
    stages: tuple[int, ...]
    num_hosts: int
    host: int


@dataclass(frozen=True, slots=True)
class PoolOpened:
    """Address at which peers read the pool that was opened."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class ConnectPeer:
    """Prepare reads of the peer of this card, which are of `connection` then."""

    connection: int
    card: bytes


@dataclass(frozen=True, slots=True)
class DisconnectPeer:
    """Fail its reads, and forget it."""

    connection: int


@dataclass(frozen=True, slots=True)
class ReadPeer:
    """Read these units of a peer into those of this host, as `KVTransport.read`."""

    connection: int
    remote: "array[int]"
    local: "array[int]"
    deadline_s: float | None


@dataclass(frozen=True, slots=True)
class ReadEnded:
    """`error`: None = all bytes are there. `is_over`: unless it may still write; then the same is said again."""

    error: str | None
    is_over: bool


@dataclass(frozen=True, slots=True)
class Inspect:
    """As in `PageBytes`."""

    crc32s: tuple[tuple[PagePart, ...], ...]
    are_finite: tuple[NumberParts, ...]


@dataclass(frozen=True, slots=True)
class Inspected:
    crc32s: tuple[int, ...]
    are_finite: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class ClosePool:
    """On return the KV is neither read nor written by peers or reads."""


@dataclass(frozen=True, slots=True)
class Done:
    """Answer to calls that have no other answer."""


@dataclass(frozen=True, slots=True)
class Failed:
    """`is_for_good`: trying again cannot help."""

    reason: str
    is_for_good: bool = False


KVCall = OpenPool | ConnectPeer | DisconnectPeer | ReadPeer | Inspect | ClosePool
KVAnswer = PoolOpened | Done | ReadEnded | Inspected | Failed
