"""Interface of the locality index: workers report blocks stored and removed, routers look up the holders of a prefix.

All answers are hints: a wrong one costs a recompute or a refused fetch, never a wrong token. So hashes are shortened,
lost reports are repaired by a snapshot rather than prevented, and entries beyond the memory bound are dropped.
Only KV group 0 is indexed: the full-attention group if the model has one, whose blocks alone determine the length of a
prefix. For models of windowed groups alone, which drop old blocks, answers are too low. Where other groups are
windowed or hold constant (recurrent) states, only blocks up to one after which a request can continue are reported, and
beside them the names of those after which it can.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from tandem.core.errors import ConfigurationError, InvalidRequestError, shown
from tandem.core.events import BlockEvent, BlockStored
from tandem.core.hashing import HASH_BYTES

KEY_BYTES = 15  # NOTE: of a hash's 32. 120 bits do not collide by accident, and in CPython 16 would take a third more.
COUNTED_GROUP = 0  # the KV group that is indexed
DEFAULT_MAX_BLOCK_REPLICAS = 8_000_000  # (block, worker) pairs in an index
MIN_BLOCK_REPLICAS = 1024  # the smallest bound of an index
SILENT_S = 30.0  # without a report, after which an incarnation counts as ended


class PublishResult(Enum):
    """Result of a report: applied; a snapshot is needed (RESYNC); or a later incarnation reports (STALE).

    APPLIED: the index contains it (a repeated sequence number is not applied twice).
    RESYNC: the index missed a report, or has lost or never known this worker: send a snapshot with `replace`.
    STALE: a later incarnation of this worker has reported within `SILENT_S`; nothing was changed. Retry later.
    """

    APPLIED = "applied"
    RESYNC = "resync"
    STALE = "stale"


@dataclass(frozen=True, slots=True)
class LocalityStats:
    """Fill level of an index. A block replica is a block held by one worker; replicas of workers that are gone count
    until they are cleaned up.

    Args:
        num_rotations: number of times the older generation was dropped since the index was created.
    """

    num_workers: int
    num_blocks: int
    num_block_replicas: int
    max_block_replicas: int
    num_rotations: int


class LocalityIndex(Protocol):
    """Index of the workers that hold each block. Thread-safe; reports of one worker must come from one caller in order.

    A worker is identified by its id and an epoch that grows with each incarnation (0 <= epoch < 2**64). If its clock
    was set back, a smaller epoch is accepted once the larger one has been silent for `SILENT_S`. Reports are numbered;
    a snapshot names the number it reflects, and the next report continues from there. A worker without changes must
    report an empty batch now and then, since only the result tells it of a loss.

    Memory is bounded by `max_block_replicas`. Entries live in two generations; storing or looking up an entry moves it
    to the recent one. When that reaches half of the bound, the previous generation is dropped and the recent one takes
    its place. So the least recently used entries go first, and no block that a worker holds is dropped as long as all
    workers together hold at most half of the bound.

    An index outside this process raises `LocalityUnavailableError` from every method when it cannot be reached.
    """

    def publish(self, worker_id: str, epoch: int, events: Sequence[BlockEvent], sequence: int) -> PublishResult:
        """Apply a worker's changes in order. `sequence` must be one more than the last that was applied; a larger one
        changes nothing and is answered RESYNC, the same one again APPLIED.

        Raises:
            InvalidRequestError: for a hash, id or number that is out of range.
        """
        ...

    def replace(self, worker_id: str, epoch: int, hashes: Iterable[bytes], sequence: int) -> PublishResult:
        """Replace the worker's entries by `hashes`, all that it holds after its report `sequence`.

        Previous entries disappear when the call starts; `hashes` become visible together when it ends.

        Raises:
            InvalidRequestError: for a hash, id or number that is out of range.
        """
        ...

    def leading_blocks(self, hashes: Sequence[bytes]) -> Mapping[str, int]:
        """Returns the number of leading blocks of this chain that each worker holds, if it holds the first.

        Workers evict a chain from its end, so one that holds a block holds those before it. Beyond the first blocks of
        a chain an index may rely on that, so the number may be too high for a worker with a gap.

        Raises:
            InvalidRequestError: for a hash that is not one.
        """
        ...

    def resumable_blocks(self, hashes: Sequence[bytes], leading: Mapping[str, int]) -> Mapping[str, int]:
        """Returns the largest number of blocks of this chain, at most that of `leading`, after which a request can
        continue at each worker (`kvcache.resumable`), if there is one.

        Raises:
            InvalidRequestError: for a hash that is not one.
        """
        ...

    def remove_worker(self, worker_id: str) -> None:
        """Remove a worker in O(1): its entries become invisible at once and are cleaned up later."""
        ...

    def stats(self) -> LocalityStats: ...


def net_changes(events: Iterable[BlockEvent]) -> dict[bytes, bool]:
    """Returns, per shortened hash, whether the worker holds the block after all `events` of group 0."""
    counted = [event for event in events if event.group == COUNTED_GROUP]
    check_hashes([event.block_hash for event in counted])
    return {event.block_hash[:KEY_BYTES]: isinstance(event, BlockStored) for event in counted}


def check_hashes(hashes: Sequence[bytes]) -> None:
    """Raises `InvalidRequestError` for what cannot be block hashes."""
    if set(map(len, hashes)) - {HASH_BYTES}:
        wrong = next(block_hash for block_hash in hashes if len(block_hash) != HASH_BYTES)
        raise InvalidRequestError(f"block hash {shown(wrong)} has {len(wrong)} bytes; send {HASH_BYTES}")


def check_report(worker_id: str, epoch: int, sequence: int) -> None:
    """Raises `InvalidRequestError` for a report whose header could not be kept exactly."""
    if not worker_id:
        raise InvalidRequestError("worker_id is empty; name the worker that reports")
    if not 0 <= epoch < 1 << 64:
        raise InvalidRequestError(f"epoch={epoch} of worker {worker_id!r} is out of range; use 0 to 2**64 - 1")
    if not 0 <= sequence < 1 << 53:
        raise InvalidRequestError(f"sequence={sequence} of worker {worker_id!r} is out of range; use 0 to 2**53 - 1")


def check_limit(max_block_replicas: int) -> None:
    """Raises `ConfigurationError` for a bound within which not even one popular block fits."""
    if max_block_replicas < MIN_BLOCK_REPLICAS:
        raise ConfigurationError(
            f"max_block_replicas={max_block_replicas} is too small; use {MIN_BLOCK_REPLICAS} or more, best twice what "
            "all workers together can hold"
        )
