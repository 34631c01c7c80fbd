"""Messages about the KV of a further host of ranks: calls by the group's leader, and the host's answers. Both carry the
call's number.
"""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass

from tandem.compute.page_bytes import NumberParts, PagePart


@dataclass(frozen=True, slots=True)
class OpenPool:
    """Call: let other workers read the KV of this host's ranks, under this incarnation (one run of the leader). The
    other fields, except `compatibility`, make a `transport.base.MemoryPool`.
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
    """Answer to `OpenPool`: address at which other workers read the pool."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class ConnectPeer:
    """Call: prepare reads from the peer that this card describes; later calls name it by `connection`."""

    connection: int
    card: bytes


@dataclass(frozen=True, slots=True)
class DisconnectPeer:
    """Call: fail all reads from a peer, and forget it."""

    connection: int


@dataclass(frozen=True, slots=True)
class ReadPeer:
    """Call: read units `remote` of a peer into units `local` of this host, within `deadline_s` seconds (None = a time
    that follows from the measured rate). A unit is a page or a piece of one.
    """

    connection: int
    remote: "array[int]"
    local: "array[int]"
    deadline_s: float | None


@dataclass(frozen=True, slots=True)
class ReadEnded:
    """Answer to `ReadPeer`. `error`: None = all bytes have arrived. `is_over`: False = the failed read may still write;
    another answer follows when that is over.
    """

    error: str | None
    is_over: bool


@dataclass(frozen=True, slots=True)
class Inspect:
    """Call: compute checksums of pages and check their numbers, all of this host's ranks."""

    crc32s: tuple[tuple[PagePart, ...], ...]
    are_finite: tuple[NumberParts, ...]


@dataclass(frozen=True, slots=True)
class Inspected:
    """Answer to `Inspect`: one result for each item of the call."""

    crc32s: tuple[int, ...]
    are_finite: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class ClosePool:
    """Call: end all reads, by peers and from peers; once answered, the KV is neither read nor written."""


@dataclass(frozen=True, slots=True)
class Done:
    """Answer to calls without a result."""


@dataclass(frozen=True, slots=True)
class Failed:
    """Answer to a call that failed. `is_for_good`: trying again cannot help."""

    reason: str
    is_for_good: bool = False


KVCall = OpenPool | ConnectPeer | DisconnectPeer | ReadPeer | Inspect | ClosePool
KVAnswer = PoolOpened | Done | ReadEnded | Inspected | Failed
